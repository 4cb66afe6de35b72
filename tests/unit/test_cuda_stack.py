"""The pinned CUDA packages fit together for the image, and the two source builds find their headers.

Nothing is installed or built, and of gigabytes of wheels only the headers are read. What is linked, and what
runs on a GPU, is not tested.
"""

import io
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import zipfile

import pytest
import setuptools

from tests.spawn import ROOT

PYTHON, UBUNTU = "3.12", "manylinux_2_39"
"""Versions of the image in Dockerfile and lockstep.def, Ubuntu 24.04."""
EXTRAS = ("cuda-build", "cuda", "compiled", "mpi", "slurm", "test", "report")
FROM_SOURCE = {
    "flash-attn": ("2.8.3", ["torch", "einops"]),
    "transformer-engine-torch": (
        "2.11.0",
        [
            "torch>=2.1",
            "einops",
            "onnxscript",
            "onnx",
            "packaging",
            "pydantic",
            "transformer_engine_cu13==2.11.0",
        ],
    ),
}
"""Packages without wheels: version, and the requirements of their setup.py with a torch for CUDA 13."""
TOOLKIT = [
    f"nvidia-{name}"
    for name in "cuda-runtime cuda-crt cuda-cccl cuda-nvrtc cublas cusolver cusparse nvtx".split()
]
"""Wheels with the headers of the image's CUDA toolkit."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def resolve(tmp_path_factory):
    """Return a function from an architecture to its packages by name, as in a pylock.toml."""
    directory = tmp_path_factory.mktemp("resolver")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", directory, "uv"]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip("no package index is reachable")
    captured: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: captured.update(arguments))
        patch.chdir(ROOT)
        runpy.run_path("setup.py")
    wanted = [line for extra in EXTRAS for line in captured["extras_require"][extra]]
    (directory / "wanted.txt").write_text("\n".join(captured["install_requires"] + wanted))
    lines = [
        f"[[dependency-metadata]]\nname = '{name}'\nversion = '{version}'\nrequires-dist = {requirements}\n"
        for name, (version, requirements) in FROM_SOURCE.items()
    ]
    (directory / "uv.toml").write_text("".join(lines))

    def resolved(machine: str) -> dict[str, dict]:
        command = [directory / "bin" / "uv", "pip", "compile", directory / "wanted.txt"]
        command += ["--python", sys.executable, "--python-version", PYTHON, "--format", "pylock.toml"]
        command += ["--python-platform", f"{machine}-{UBUNTU}", "--config-file", directory / "uv.toml"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {package["name"]: package for package in tomllib.loads(done.stdout)["packages"]}

    return resolved


@pytest.fixture(scope="module")
def x86(resolve):
    return resolve("x86_64")


def test_both_machines_get_the_same_versions(resolve, x86):
    arm = resolve("aarch64")
    versions = [{name: package["version"] for name, package in found.items()} for found in (x86, arm)]
    assert versions[0] == versions[1] and len(versions[0]) > 200
    for found in (x86, arm):
        assert {name for name, package in found.items() if "wheels" not in package} == set(FROM_SOURCE)


def test_all_packages_are_for_one_cuda(x86):
    majors = {name: package["version"].partition(".")[0] for name, package in x86.items()}
    assert majors["nvidia-cublas"] == majors["nvidia-cuda-runtime"] == majors["cuda-toolkit"] == "13"
    foreign = [name for name in x86 if re.search(r"-cu1[0-24-9]$", name)]
    assert foreign == ["nvidia-cutlass-dsl-libs-cu12"]  # which cutlass-dsl requires for every CUDA


def source(package: dict, directory):
    """Unpack the package's sources; return their directory."""
    content = urllib.request.urlopen(package["sdist"]["url"], timeout=120).read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(directory, filter="data")
    return next(directory.glob(f"{package['name'].replace('-', '_')}-*"))


class Remote(io.RawIOBase):
    """A file at a URL. Only the parts that are read are fetched, a MiB at a time."""

    def __init__(self, url: str, size: int):
        self._url, self._size, self._position, self._part = url, size, 0, (0, b"")

    def seekable(self):
        return True

    def tell(self):
        return self._position

    def seek(self, offset, whence=os.SEEK_SET):
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, count=-1):
        start = self._position
        end = self._size if count < 0 else min(start + count, self._size)
        first, part = self._part
        if not first <= start <= end <= first + len(part):
            last = max(end, min(start + (1 << 20), self._size)) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={start}-{last}"})
            first, part = self._part = start, urllib.request.urlopen(request, timeout=120).read()
        self._position = end
        return part[start - first : end - first]


@pytest.fixture(scope="module")
def compiled(x86, tmp_path_factory):
    """Return a function that compiles a file of a package, without code, as the package's build does."""
    site = tmp_path_factory.mktemp("site")
    for name in ("torch", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", *TOOLKIT):
        (wheel,) = x86[name]["wheels"]
        with zipfile.ZipFile(Remote(wheel["url"], wheel["size"])) as archive:
            headers = [entry for entry in archive.infolist() if "/include/" in entry.filename]
            for entry in sorted(headers, key=lambda entry: entry.header_offset):
                archive.extract(entry, site)
    recipe = (ROOT / "tools" / "install_cuda.sh").read_text()
    exported = re.search(r'CPATH="((\$nvidia/[a-z/]+:?)+)', recipe)
    assert exported is not None
    torch = site / "torch" / "include"
    common = [
        torch,
        torch / "torch/csrc/api/include",
        site / "nvidia/cu13/include",
        sysconfig.get_path("include"),
    ]

    def compile_file(package: str, file: str, *includes: str) -> None:
        root = source(x86[package], site)
        directories = [*common, *(root / include for include in includes)]
        done = subprocess.run(
            ["g++", "-fsyntax-only", "-w", "-std=c++17", "-DTORCH_EXTENSION_NAME=extension"]
            + [f"-I{directory}" for directory in directories]
            + [root / file],
            env=os.environ | {"CPATH": exported[1].replace("$nvidia", str(site / "nvidia"))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return compile_file


def test_transformer_engine_finds_its_headers(compiled):
    headers = ("common_headers", "common_headers/common", "common_headers/common/include", "csrc")
    compiled("transformer-engine-torch", "csrc/extensions/attention.cpp", *headers)


def test_flash_attention_finds_its_headers(compiled):
    headers = ("csrc/flash_attn", "csrc/flash_attn/src", "csrc/cutlass/include")
    compiled("flash-attn", "csrc/flash_attn/flash_api.cpp", *headers)


@pytest.mark.parametrize("name", FROM_SOURCE)
def test_stated_requirements_are_the_packages_own(x86, tmp_path, name):
    text = (source(x86[name], tmp_path) / "PKG-INFO").read_text()
    own = re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)
    # On the machine that made the archive, setup.py found a torch for CUDA 12.
    assert [line.replace("_cu12", "_cu13") for line in own] == FROM_SOURCE[name][1]
    assert x86[name]["version"] == FROM_SOURCE[name][0]
