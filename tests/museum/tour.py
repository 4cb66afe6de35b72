"""Runs of the museum: each exhibit once, and clean runs in which no check may raise."""

import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.museum.images import SQUARES
from tests.museum.lines import raised_in
from tests.museum.museum import Exhibit
from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import FROM_DATA, SFT, TRAIN, UNSCORED

RANK = Path(__file__).parent / "rank.py"
LAST_LINE = re.compile(r"^error.*$", re.MULTILINE)
WARNING = re.compile(r"^warning: .*$", re.MULTILINE)
STEP = re.compile(r" of step (\d+)")
CULPRIT = re.compile(r"\brank (\d+)")
STEPS_BEFORE = 2
"""Steps of the clean run that an exhibit with `resumes` continues."""
CONFIG = """
algorithm: grpo
run: {name: museum, max_steps: 3}
data: {max_prompt_tokens: 16, prompts_per_step: 4}
training: {micro_batch_tokens: 100, optimizer: {lr: 1.0e-3}}
rollout: {samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}
reward: {function: "TOY/reward.py:score", workers: 1}
validation: {every: 0}
logging: {tensorboard: false}
"""
MODELS: dict[str, tuple[str, dict]] = {
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie": True}),
    "qwen2-blocks": ("Qwen2ForCausalLM", {"num_key_value_heads": 4, "intermediate_size": 128}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-only": ("Qwen3MoeForCausalLM", {"mlp_only_layers": []}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek-v3-mtp": ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 1}),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", {}),
}
"""Name -> architecture and options of tools/tiny_models.py: random models of 2 or 3 layers."""
DENSE = {"qwen2", "qwen2-tied", "qwen2-blocks", "llama"}
"""Models for which a pretrained dense model can stand in."""
CHAT_SIZES = ("data.max_prompt_tokens", "training.micro_batch_tokens")
"""Keys whose values are multiplied by CHAT_FACTOR for a pretrained model, because its chat template adds a
system message."""
CHAT_FACTOR = 4
FILES = {"dpo": "pairs", "kto": "labels"}
"""Algorithm -> file of the toy task that it reads instead of train.parquet."""
SAVE_TOY = """
import sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from tests.checkpoints import quantise_layers, save_qwen2, save_qwen2_classifier
from tests.toy import save_toy
from tools.make_image_toy import rows_of
from tools.make_toy import write_problems

toy = save_toy(Path(sys.argv[1]))
pq.write_table(pa.Table.from_pylist(rows_of("train", 4, 0)), toy / "squares.parquet")
(toy / "order.py").write_text("def order(epoch, prompts, rng): return rng.permutation(len(prompts))")
write_problems(toy / "long.parquet", [(10 ** 70 + i, 10 ** 70) for i in range(4)])
turns = [{"role": role, "content": text} for role, text in (("user", "1+2="), ("assistant", "3"))]
pq.write_table(pa.Table.from_pylist([{"messages": 2 * turns}] * 8), toy / "chats.parquet")
save_qwen2_classifier(toy / "classifier", seed=3)
sizes = dict(hidden_size=192, num_attention_heads=6, intermediate_size=384)
quantise_layers(save_qwen2(toy / "fp8", seed=0, **sizes))
"""
SAVE_MODEL = """
import json, sys
from tools.tiny_models import save_tiny

save_tiny(sys.argv[1], sys.argv[2], seed=0, **json.loads(sys.argv[3]))
"""
ENVIRONMENTS = (
    f"agents.environment={ROOT / 'tests' / 'runs' / 'agent_game.py'}:Echo",
    "agents.max_tokens_per_turn=6",
    "agents.workers=1",
    "agents.order=waves",
    "rollout.max_response_tokens=40",
)
ROLES = ("roles.train=0-0", "roles.rollout=1-1", "roles.lag=1", "rollout_correction.truncate_tokens=2.0")
BESIDE = ("adapter.kind=rslora", "adapter.in_engine=adapter", "adapter.rank=4")
BF16 = "model.dtype=bfloat16"
BY_CLASS = "training.backend=transformers"
TEACHER = ("teacher.path=POLICY", "teacher.top_k=4", "rollout.temperature=0.7", *UNSCORED)
CLEAN: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "grpo, dp 2": (2, "qwen2", ()),
    "grpo, tp 2, two epochs": (2, "qwen2", ("training.tp=2", "rollout.tp=2", "training.epochs=2")),
    "ppo": (1, "qwen2", ("algorithm=ppo", "objective.reward_kl.coef=0.1")),
    "dapo": (1, "qwen2", ("algorithm=dapo", "dynamic_sampling.prompts_per_round=4")),
    "dpo": (1, "qwen2", ("algorithm=dpo", "training.prompts_per_minibatch=0", *FROM_DATA)),
    "bfloat16": (2, "qwen2", (BF16, "objective.kl_coef=0.01")),
    "experts, ep 2": (2, "qwen3-moe", ("training.ep=2",)),
    "latents, bfloat16": (1, "deepseek-v3", (BF16,)),
    "sampling masks": (1, "llama", ("rollout.top_p=0.9", "rollout.top_k=20")),
    "environments": (1, "qwen2", ENVIRONMENTS),
    "carry-over": (1, "qwen2", ("rollout.carry_over=true", "rollout_correction.truncate_tokens=2.0")),
    "roles": (2, "qwen2", ROLES),
    "adapters": (2, "qwen2", ("adapter.kind=lora", "training.tp=2", BF16)),
    "adapters beside the weights, bfloat16": (
        2,
        "qwen2",
        (*BESIDE, "rollout.tp=2", "objective.kl_coef=0.01", BF16),
    ),
    "ppo, bfloat16": (2, "qwen2-tied", ("algorithm=ppo", "training.epochs=2", "training.tp=2", BF16)),
    "replayed experts, bfloat16": (2, "qwen3-moe", ("training.router_replay=engine", "training.ep=2", BF16)),
    "sampling masks, bfloat16": (1, "llama", ("rollout.top_p=0.9", "rollout.temperature=0.8", BF16)),
    "environments, bfloat16": (2, "qwen2", (*ENVIRONMENTS, "rollout.tp=2", BF16)),
    "carry-over, bfloat16": (
        1,
        "llama",
        ("rollout.carry_over=true", "rollout_correction.truncate_tokens=2.0", BF16),
    ),
    "drafts of a head that learns, bfloat16": (
        2,
        "deepseek-v3-mtp",
        ("rollout.draft.method=mtp", "training.mtp.head_lr=1e-3", "training.pp=2", BF16),
    ),
    "roles, bfloat16": (2, "qwen2", (*ROLES, "roles.granularity=group", BF16)),
    "context parallel ranks": (2, "llama", ("training.cp=2", "training.prompts_per_minibatch=2")),
    "pipeline of experts, bfloat16": (2, "qwen3-moe", ("training.pp=2", BF16)),
    "class of transformers": (2, "qwen2", (BY_CLASS, "training.shard=2", "objective.kl_coef=0.01")),
    "class of transformers, adapters, bfloat16": (1, "llama", (BY_CLASS, "adapter.kind=lora", BF16)),
    "sft, bfloat16": (2, "qwen2", (*SFT, BF16)),
    "kto": (2, "qwen2", ("algorithm=kto", "training.prompts_per_minibatch=0", *FROM_DATA)),
    "distillation, bfloat16": (2, "qwen2", ("algorithm=distill", *TEACHER, "training.tp=2", BF16)),
    "prime": (1, "qwen2", ("algorithm=prime",)),
    "remax, gspo, bfloat16": (2, "qwen2", ("algorithm=remax", "objective.loss=gspo", BF16)),
    "images, bfloat16": (2, "qwen2.5-vl", (*SQUARES, BF16)),
    "engine in FP8": (1, "qwen2-blocks", ("rollout.quantization=fp8", BF16)),
    "sweep": (1, "qwen2", (*BESIDE, "sweep.adapters=[{}, {training.optimizer.lr: 2e-3}]")),
    "delta nets, bfloat16": (1, "qwen3-next", (BF16,)),
}
"""Name -> number of ranks, model and overrides. Each run stops half-way and resumes."""
ALL_CHECKS = ("agreement.weights_every=1", "refit.check_every=1")


@dataclass(frozen=True)
class Visit:
    """Result of a run with a bug."""

    exhibit: Exhibit
    line: str
    """The last error line of the run; empty if the run did not fail."""
    acted: int | None
    """First step with an effect of the bug; None without an effect."""
    found: int | None
    """Last step of the run."""
    rank: str
    """Rank that the line names."""
    seconds: float
    check: tuple[str, int]
    """The function that raised the error, as file:function, and its number of lines; ("", 0): unknown."""

    @property
    def is_caught(self) -> bool:
        """Whether the expected error ended the run within one step of the injection."""
        return self.is_in_time and re.search(self.exhibit.expects, self.line) is not None

    @property
    def is_in_time(self) -> bool:
        """Whether an error or a warning came within one step of the injection."""
        has_acted = self.acted is not None and self.line != ""
        return has_acted and (self.found is None or self.found - max(self.acted or 0, 1) <= 1)


class Museum:
    """The runs of one directory, which share the toy task, the models and the checkpoints of clean runs.

    pretrained: directory of a pretrained model that takes the place of the models in DENSE.
    """

    def __init__(self, directory: Path, pretrained: Path | None = None):
        self.directory, self.pretrained = directory, pretrained
        directory.mkdir(parents=True, exist_ok=True)
        run_ranks(1, "", timeout=300)  # starts the process from which ranks are forked

    def visit(self, exhibit: Exhibit, silenced: str = "") -> Visit:
        """Run an exhibit. silenced: a check, as `Visit.check` names it, whose errors are swallowed."""
        place = self.directory / (re.sub(r"\W+", "_", exhibit.name) + "_silenced" * bool(silenced))
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        steps = STEPS_BEFORE + 2 if exhibit.resumes else exhibit.at + 1
        if exhibit.resumes:
            shutil.copytree(self._run_to_resume(exhibit), place / "run")
        arguments = self._arguments(exhibit, place / "run", f"run.max_steps={steps}")
        start, line, log = time.monotonic(), "", ""
        try:
            given = RANK, exhibit.name, place, silenced
            stdout = run_ranks(exhibit.ranks, *given, *arguments, timeout=300 if silenced else 900)
            line = "".join(WARNING.findall(stdout[0])[:1]) if exhibit.warns else ""
        except RanksFailed as error:
            (place / "log").write_text(log := str(error))
            line = (LAST_LINE.findall(log) or [log])[-1]
        seconds = time.monotonic() - start
        notes = (place / "acted").read_text().split() if (place / "acted").exists() else []
        acted = min(map(int, notes[::2]), default=None)
        first = STEPS_BEFORE + 1 if exhibit.resumes else 1
        step, culprit = STEP.search(line), CULPRIT.search(line)
        return Visit(
            exhibit,
            line,
            acted=None if acted is None else max(acted, first),
            found=int(step[1]) if step else None,
            rank=culprit[1] if culprit else "-",
            seconds=seconds,
            check=raised_in(log),
        )

    def clean(self, name: str, steps: int) -> tuple[int, list[str]]:
        """Run a config of CLEAN for so many steps, with all checks on, and resume it half-way.

        Returns the number of logged steps and the warnings. Raises RanksFailed if a check raised.
        """
        ranks, model, overrides = CLEAN[name]
        run = self.directory / f"clean_{re.sub(r'[^a-z0-9]+', '_', name)}"
        shutil.rmtree(run, ignore_errors=True)
        warnings: list[str] = []
        for last in sorted({max(1, steps // 2), steps}):
            arguments = self.arguments(model, run, *overrides, *ALL_CHECKS, f"run.max_steps={last}")
            arguments.append(f"checkpoint.every={steps}")
            said = run_ranks(ranks, TRAIN, *arguments, timeout=7200, with_stderr=True)
            warnings += (line for text in said for line in WARNING.findall(text))
        logs = run.rglob("metrics.jsonl")  # of each point of a sweep
        num_steps = min(len(log.read_text().splitlines()) for log in logs)
        shutil.rmtree(run)  # a pretrained model's checkpoint is large
        return num_steps, warnings

    def arguments(self, model: str, run: Path, *overrides: str) -> list[str]:
        """Return the arguments of train_rl.py for a run of a model, with overrides."""
        toy = self._made("toy", SAVE_TOY)
        raw = yaml.safe_load(CONFIG.replace("TOY", str(toy)))
        files = [file for algorithm, file in FILES.items() if f"algorithm={algorithm}" in overrides]
        raw["data"]["train"] = [str(toy / f"{(*files, 'train')[0]}.parquet")]
        if self.pretrained and model in DENSE:
            path = self.pretrained
            raw["training"]["optimizer"]["lr"] = 1e-5
            raw["data"]["max_prompt_tokens"] *= CHAT_FACTOR
            raw["training"]["micro_batch_tokens"] *= CHAT_FACTOR
            raw["rollout"]["cpu_kv_cache_mib"] *= CHAT_FACTOR
            overrides = tuple(map(_with_room_for_a_chat, overrides))
        else:
            architecture, options = MODELS[model]
            path = self._made(model, SAVE_MODEL, architecture, json.dumps(options), to=1)
        raw["model"] = {"path": str(path), "dtype": "float32"}
        run.parent.mkdir(parents=True, exist_ok=True)
        config = run.parent / f"{run.name}.yaml"
        config.write_text(yaml.dump(raw))
        return [
            "--config",
            str(config),
            f"run.dir={run}",
            *(key.replace("TOY", str(toy)).replace("POLICY", str(path)) for key in overrides),
        ]

    def _arguments(self, exhibit: Exhibit, run: Path, *more: str) -> list[str]:
        return self.arguments(exhibit.model, run, *exhibit.overrides, *more)

    def _run_to_resume(self, exhibit: Exhibit) -> Path:
        """Return the directory of a clean run of STEPS_BEFORE steps, which wrote a checkpoint."""
        key = repr((exhibit.ranks, exhibit.model, exhibit.overrides))
        run = self.directory / f"before_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        if not (run / "checkpoints").exists():
            arguments = self._arguments(exhibit, run, f"run.max_steps={STEPS_BEFORE}", "checkpoint.every=1")
            run_ranks(exhibit.ranks, TRAIN, *arguments, timeout=900)
        return run

    def _made(self, name: str, program: str, *args: str, to: int = 0) -> Path:
        """Return the directory that the program writes, once; its path is argument number `to`."""
        path = self.directory / name
        if not path.exists():
            given = list(args)
            given.insert(to, str(path))
            run_ranks(1, program, *given, env={"PYTHONPATH": str(ROOT)}, timeout=120)
        return path


def fits_pretrained(name: str) -> bool:
    """Whether a pretrained dense model with an odd number of heads can stand in in a run of CLEAN."""
    _, model, overrides = CLEAN[name]
    return model in DENSE and not any(key.endswith(".tp=2") for key in overrides)


def _with_room_for_a_chat(override: str) -> str:
    """Return the override with CHAT_FACTOR times the tokens, if it is one of CHAT_SIZES."""
    key, _, value = override.partition("=")
    return f"{key}={int(value) * CHAT_FACTOR}" if key in CHAT_SIZES else override
