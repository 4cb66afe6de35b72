"""Check the names that rl/ uses of vLLM, Megatron, Transformer Engine and torch against their sources.

    python tools/library_names.py                             the installed packages
    python tools/library_names.py vllm=DIR megatron=DIR       unpacked wheels of other versions
    python tools/library_names.py --record tests/unit/tools/transformer_engine.json transformer_engine=DIR

It checks that every imported name and attribute exists and that calls have valid arguments. It reads sources
and imports nothing, so it can also check packages that cannot be imported here (Transformer Engine, CUDA
builds). --record writes the used names of such a package, with its version, for tests. Exit code 1: a name or
argument is missing.
"""

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("vllm", "megatron", "transformer_engine", "torch.cuda", "torch.distributed", "torch.nn.attention")
"""Packages, or parts of them, whose names are checked."""
ON_CPU = ("rl/rollout/cpu_support.py", "rl/rollout/cpu_async.py", "rl/training/cpu_support.py")
"""Files that use names of the CPU builds."""
ATTRIBUTES = {
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "engine_core model_executor output_processor model_config vllm_config step add_request abort_request"
    ),
    "vllm.v1.engine.core_client.InprocClient": "abort_requests(request_ids) engine_core _finalizer",
    "vllm.v1.engine.core.EngineCore": "scheduler batch_queue step_with_batch_queue()",
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "requests connector aux_output_connector dynamic_sd_lookup max_num_running_reqs has_requests() "
        "make_spec_decoding_stats(spec_decoding_stats,"
        "num_draft_tokens,num_accepted_tokens,num_invalid_spec_tokens,request_id)"
    ),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": "schedule update_from_output",
    "vllm.v1.request.Request": "output_token_ids num_output_tokens",
    "vllm.v1.engine.output_processor.OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor.RequestState": "logprobs_processor",
    "vllm.v1.engine.logprobs.LogprobsProcessor": "logprobs",
    "vllm.logprobs.FlatLogprobs": "logprobs",
    "vllm.distributed.aux_output_connector.connector.AuxOutputSchedulerConnector": (
        "take_output(request,output)"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": (
        "get_num_new_matched_tokens(request,num_computed_tokens) request_finished(request,block_ids) "
        "update_state_after_alloc(request,blocks,num_external_tokens) build_connector_meta(scheduler_output) "
        "reset_cache() register_kv_caches(kv_caches) handle_preemptions(kv_connector_metadata) "
        "start_load_kv(forward_context)"
    ),
    "vllm.config.VllmConfig": "aux_output_config",
    "vllm.LLM": (
        "llm_engine apply_model(func) sleep(level) wake_up(tags) reset_prefix_cache(reset_running_requests)"
    ),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": "driver_worker vllm_config",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner",
    # CUDA runs the second model runner, the CPU build a subclass of the first.
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": (
        "reload_weights(weights_iterator) lora_manager sampler speculator"
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "kv_caches reload_weights(weights_iterator) lora_manager drafter"
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator": "propose(input_batch)",
    "vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator": "model speculative_config draft_tokens",
    "vllm.v1.worker.gpu.input_batch.InputBatch": "num_reqs",
    "vllm.config.SpeculativeConfig": "draft_sample_method draft_model_config",
    "vllm.v1.worker.gpu.sample.logprob": "compute_token_logprobs(logits,token_ids)",
    "vllm.v1.attention.backends.triton_attn.TritonAttentionImpl": (
        "forward(layer,query,key,value,kv_cache,attn_metadata,output) "
        "do_kv_cache_update(layer,key,value,kv_cache,slot_mapping)"
    ),
    "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadata": "query_start_loc block_table seq_lens",
    "vllm.lora.worker_manager.WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager.LRUCacheLoRAModelManager": (
        "modules packed_modules lora_index_to_id _registered_adapters _last_mapping "
        "activate_adapter(lora_id) remove_adapter(adapter_id)"
    ),
    "vllm.lora.layers.base.BaseLayerWithLoRA": "reset_lora(index)",
    "vllm.compilation.backends.CompilerManager": "cache_file_path save_to_file()",
    "vllm.config.CompilationConfig": "compilation_time cudagraph_capture_sizes",
    "vllm.outputs.CompletionOutput": "token_ids logprobs finish_reason routed_experts sampling_mask",
    "vllm.outputs.SamplingMask": "token_ids",
    "vllm.outputs.RequestOutput": "request_id outputs finished prompt_token_ids",
}
"""Class or module -> what the program uses of it without naming it, with the parameters that it passes or
whose function it replaces."""
FORWARDED = {"vllm.LLM": "vllm.EngineArgs"}
"""Callable -> dataclass to which it passes its other keyword arguments."""


@dataclass(frozen=True)
class Use:
    """A use of a library name in the program, with the arguments if it is a call."""

    where: str
    """file:line"""
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    is_call: bool = False


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable. `names` is None for values and C code, which are not checked."""

    names: tuple[str, ...] | None = None
    takes_args: bool = True
    takes_kwargs: bool = True

    def problem(self, use: Use) -> str:
        """Return why the call does not match; "" if it matches."""
        if not use.is_call or self.names is None:
            return ""
        unknown = [word for word in use.keywords if word not in self.names and not self.takes_kwargs]
        if unknown:
            return f"has no parameter {', '.join(unknown)}"
        too_many = use.positional > len(self.names) and not self.takes_args
        return f"takes {len(self.names)} arguments, not {use.positional}" if too_many else ""


# ---- what the program uses ---------------------------------------------------------------------------------


def uses(files: list[Path], packages: tuple[str, ...] = CHECKED) -> list[Use]:
    """Return the uses of the packages in the files and in ATTRIBUTES."""
    found = [use for file in files for use in _uses_in(file, packages)]
    tops = {package.partition(".")[0] for package in packages}
    for owner, names in ATTRIBUTES.items():
        if owner.partition(".")[0] in tops:
            for name, _, parameters in (entry.partition("(") for entry in names.split()):
                keywords = tuple(filter(None, parameters.rstrip(")").split(",")))
                place = "tools/library_names.py: ATTRIBUTES"
                found.append(Use(place, f"{owner}.{name}", 0, keywords, bool(keywords)))
    return found


def megatron_on_te() -> list[Path]:
    """Return Megatron's files that use Transformer Engine, without FSDP, inference and other models."""
    megatron = installed("megatron")
    assert megatron is not None, "megatron-core is not installed"
    core = megatron.directory / "megatron" / "core"
    folders = "extensions optimizer tensor_parallel transformer distributed models/common models/gpt".split()
    files = [
        *core.glob("*.py"),
        *(file for folder in folders for file in sorted((core / folder).rglob("*.py"))),
    ]
    files = [file for file in files if "fsdp" not in file.parts]
    return [file for file in files if "transformer_engine" in file.read_text()]


def program_files() -> list[Path]:
    """Return the files of rl/ that also run on CUDA."""
    files = [*sorted((ROOT / "rl").rglob("*.py")), ROOT / "train_rl.py"]
    return [file for file in files if str(file.relative_to(ROOT)) not in ON_CPU]


def _uses_in(file: Path, packages: tuple[str, ...]) -> Iterator[Use]:
    text = file.read_text()
    if not any(all(part in text for part in package.split(".")) for package in packages):
        return  # without parsing, which takes seconds for all files
    tree = ast.parse(text)
    aliases: dict[str, str] = {}
    path = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)

    def is_checked(name: str) -> bool:
        return not name.rpartition(".")[2].startswith("__") and any(
            (name + ".").startswith(package + ".") for package in packages
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                if is_checked(f"{node.module}.{name.name}"):
                    yield Use(f"{path}:{node.lineno}", f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _calls_of_super(node, aliases, path, is_checked)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Module))]
    called: set[ast.expr] = set()
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and node.func not in called:
                name = _dotted(node.func, aliases)
                if name and is_checked(name):
                    called.add(node.func)
                    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
                    yield Use(
                        f"{path}:{node.lineno}",
                        name,
                        0 if starred else len(node.args),
                        tuple(_keywords(node, function)),
                        is_call=True,
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in called:
            name = _dotted(node, aliases)
            if name and is_checked(name):
                yield Use(f"{path}:{node.lineno}", name)


def _calls_of_super(owner: ast.ClassDef, aliases, path: str, is_checked) -> Iterator[Use]:
    """Yield the calls of a checked class's methods through super() in its subclass `owner`."""
    bases = [name for base in owner.bases if is_checked(name := _dotted(base, aliases))]
    for node in ast.walk(owner) if len(bases) == 1 else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("super()."):
            assert isinstance(node.func, ast.Attribute)
            name = bases[0] if node.func.attr == "__init__" else f"{bases[0]}.{node.func.attr}"
            yield Use(f"{path}:{node.lineno}", name, 0, tuple(_keywords(node, owner)), is_call=True)


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call, function: ast.AST) -> Iterator[str]:
    """Yield the keywords of a call, including those that the function collects in a dict and passes by **.

    Keys that the function tests (`if "key" in ...`) are omitted, because they may be missing.
    """
    tests = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    looked_up = {node.left.value for node in tests if isinstance(node.left, ast.Constant)}
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Name):
            yield from (key for key in _keys_of(keyword.value.id, function) if key not in looked_up)


def _keys_of(name: str, function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                value = getattr(node, "value", None)
                if isinstance(value, ast.Dict):
                    yield from (key.value for key in value.keys if isinstance(key, ast.Constant))
                elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict":
                    yield from (keyword.arg for keyword in value.keywords if keyword.arg)
            elif isinstance(target, ast.Subscript) and getattr(target.value, "id", "") == name:
                if isinstance(target.slice, ast.Constant):
                    yield target.slice.value


# ---- what a library has ------------------------------------------------------------------------------------


class Library:
    """The sources of one package."""

    def __init__(self, package: str, directory: Path):
        self.package, self.directory = package, directory
        self._trees: dict[str, ast.Module | None] = {}

    def find(self, name: str) -> Signature | None:
        """Return the signature of a dotted name, or None if there is no such name."""
        found = self._find(name, set())
        return None if found is None else self._signature(*found)

    def version(self) -> str:
        """Return the version of the wheel."""
        (info,) = self.directory.glob(f"{self.package}-*.dist-info")
        return info.name.removesuffix(".dist-info").rpartition("-")[2]

    def _find(self, name: str, seen: set[str]) -> tuple[ast.AST | None, str] | None:
        """Return (definition, its module) of a name. The definition is None for values and C code."""
        if name in seen:
            return None
        seen.add(name)
        if not (name + ".").startswith(self.package + ".") or name.startswith("torch._C"):
            return None, ""  # of another library, or C code
        module, rest = self._split(name)
        if module is None:
            return None
        node: ast.AST | None = None
        for number, attribute in enumerate(rest):
            if number == 0:
                found = self._in_module(module, attribute, seen)
            elif isinstance(node, ast.ClassDef):
                found = self._in_class(node, module, attribute, seen)
            else:
                return None, module
            if found is None:
                return None
            node, module = found
        return node, module

    def _split(self, name: str) -> tuple[str | None, list[str]]:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if self._tree(".".join(parts[:length])) is not None:
                return ".".join(parts[:length]), parts[length:]
        return None, []

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file, below = self._file(module), self.directory / module.replace(".", "/")
            empty = ast.Module([], []) if below.is_dir() else None  # a namespace package
            self._trees[module] = empty if file is None else ast.parse(file.read_text(errors="replace"))
        return self._trees[module]

    def _file(self, module: str) -> Path | None:
        base = self.directory / module.replace(".", "/")
        files = (base / "__init__.py", base.with_suffix(".py"))
        return next((file for file in files if file.is_file()), None)

    def _in_module(self, module: str, name: str, seen: set[str]):
        tree = self._tree(module)
        assert tree is not None
        stars = []
        for node in _statements(tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name == name:
                    return node, module
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    source = self._source(node, module)
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name.partition(".")[0]) == name:
                        if isinstance(node, ast.Import):
                            return self._find(alias.name if alias.asname else name, seen)
                        found = self._find(f"{source}.{alias.name}", seen)
                        if found is not None:
                            return found
            elif name in _assigned(node):
                return None, module
        for source in stars:
            found = self._find(f"{source}.{name}", seen)
            if found is not None:
                return found
        return None

    def _source(self, node: ast.Import | ast.ImportFrom, module: str) -> str:
        if isinstance(node, ast.Import):
            return ""
        if not node.level:
            return node.module or ""
        file = self._file(module)
        is_package = file is not None and file.name == "__init__.py"
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join(kept + ([node.module] if node.module else []))

    def _in_class(self, owner: ast.ClassDef, module: str, name: str, seen: set[str]):
        for node in ast.walk(owner):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node, module
            if name in _assigned(node):
                return None, module
        for _, base, where in self._bases(owner, module):
            if base is None:
                return None, module  # a class of another library may have it
            found = self._in_class(base, where, name, seen)
            if found is not None:
                return found
        return None

    def _bases(self, owner: ast.ClassDef, module: str) -> Iterator[tuple[str, ast.ClassDef | None, str]]:
        for base in owner.bases:
            name = ast.unparse(base).partition("[")[0]
            if name in ("object", "Generic", "Protocol", "ABC", "Enum", "IntEnum"):
                continue
            found = self._find(f"{module}.{name}", set())
            node, where = found or (None, "")
            yield name, node if isinstance(node, ast.ClassDef) else None, where

    def _signature(self, node: ast.AST | None, module: str) -> Signature:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _signature_of(node, is_method=False)
        if isinstance(node, ast.ClassDef):
            return self._constructor(node, module)
        return Signature()

    def _constructor(self, node: ast.ClassDef, module: str) -> Signature:
        own = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        if "__init__" in own or "__new__" in own:
            return _signature_of(own.get("__init__") or own["__new__"], is_method=True)
        bases = list(self._bases(node, module))
        if any(
            "dataclass" in ast.unparse(decorator) or "config" == ast.unparse(decorator)
            for decorator in node.decorator_list
        ):
            names = [
                child.target.id
                for child in node.body
                if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
            ]
            inherited = [self._constructor(base, where) for _, base, where in bases if base is not None]
            before = [name for signature in inherited for name in signature.names or ()]
            return Signature(
                (*before, *names), takes_args=False, takes_kwargs=any(base is None for _, base, _ in bases)
            )
        for _, base, where in bases:
            if base is not None:
                return self._constructor(base, where)
        return Signature()


class RecordedLibrary(Library):
    """The used names of a library, as written by `record`."""

    def __init__(self, file: Path):
        content = json.loads(file.read_text())
        self.package, self.recorded_version, self._names = (
            content[key] for key in ("package", "version", "names")
        )

    def find(self, name: str) -> Signature | None:
        if name not in self._names:
            raise KeyError(f"{name} is not recorded; record it with tools/library_names.py --record.")
        found = self._names[name]
        return None if found is None else Signature(found["names"] and tuple(found["names"]), *found["takes"])


def record(library: Library, file: Path) -> None:
    """Write the signatures of the library's names that the program and Megatron use.

    Names that the file already has stay, so that one record serves several versions of Megatron.
    """
    used = {use.name for use in uses([*program_files(), *megatron_on_te()], (library.package,))}
    used.update(json.loads(file.read_text())["names"] if file.exists() else ())
    names = {}
    for name in sorted(used):
        found = library.find(name)
        names[name] = found and dict(names=found.names, takes=[found.takes_args, found.takes_kwargs])
    content = dict(package=library.package, version=library.version(), names=names)
    file.write_text(json.dumps(content, indent=1) + "\n")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those inside if, try and with."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _assigned(node: ast.AST) -> set[str]:
    """Return the names, and the attributes of self, that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    leaves = [
        leaf for target in targets for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    names = {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}
    return names | {
        leaf.attr for leaf in leaves if isinstance(leaf, ast.Attribute) and ast.unparse(leaf.value) == "self"
    }


def _signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> Signature:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return Signature(tuple(names[is_method:]), arguments.vararg is not None, arguments.kwarg is not None)


# ---- the comparison ----------------------------------------------------------------------------------------


def problems(found: list[Use], libraries: Mapping[str, Library]) -> list[str]:
    """Return a message for each use of a missing name or with invalid arguments."""
    out = []
    for use in found:
        library = libraries.get(use.name.partition(".")[0])
        if library is None:
            continue
        signature = library.find(use.name)
        if signature is None:
            out.append(f"{use.where}: {library.package} has no {use.name}")
            continue
        problem = signature.problem(use)
        if use.is_call and use.name in FORWARDED:
            further = library.find(FORWARDED[use.name])
            own = signature.names or ()
            rest = tuple(word for word in use.keywords if word not in own)
            problem = (
                further.problem(Use(use.where, use.name, 0, rest, True))
                if further
                else f"lacks {FORWARDED[use.name]}"
            )
        if problem:
            out.append(f"{use.where}: {use.name} {problem}")
    return sorted(set(out))


def installed(package: str) -> Library | None:
    """Return the sources of an installed package, or None."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Library(package, Path(next(iter(spec.submodule_search_locations))).parent)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", metavar="FILE", type=Path, help="write the used names of one library")
    parser.add_argument(
        "libraries", metavar="PACKAGE=DIR", nargs="*", help="directory that holds the package"
    )
    args = parser.parse_args()
    given = dict(pair.partition("=")[::2] for pair in args.libraries)
    packages = list(given) or sorted({name.partition(".")[0] for name in CHECKED})
    libraries = {}
    for package in packages:
        library = Library(package, Path(given[package])) if package in given else installed(package)
        if library is None:
            print(f"{package} is not installed")
        else:
            libraries[package] = library
    if args.record:
        (library,) = libraries.values()
        record(library, args.record)
        return 0
    found = uses(program_files())
    missing = problems(found, libraries)
    print("\n".join(missing) or f"{len(found)} uses, all of them found")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
