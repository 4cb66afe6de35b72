# The CUDA stack of Lockstep. This file pins no Python package: the versions are in setup.py's `cuda` extra, and the commands in
# tools/install_cuda.sh, which says what the arguments mean. lockstep.def is the same image for Apptainer.
#
#   docker build -t lockstep .                                                           x86-64, or aarch64 (GH200)
#   docker build -t lockstep --build-arg CUDA_ARCHS="9.0" --build-arg MAX_JOBS=32 .      one GPU type: a much shorter build
#   docker build -t lockstep --build-arg APEX_REF=master .                               with NVIDIA's apex
#
# slurm/site.example.sh shows how batch files use it (enroot import).

# CUDA 13.0, because torch and vLLM on PyPI are built for it; `devel` for nvcc, which compiles flash-attn. Not the
# `cudnn` variant: transformer-engine loads a system cuDNN before the one torch ships, and two versions in one process fail.
# Ubuntu 24.04 has Python 3.12 and a GCC that nvcc 13 supports.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ARG CUDA_ARCHS="8.0;9.0;10.0;12.0"
ARG MAX_JOBS=8
ARG APEX_REF=none

ENV VIRTUAL_ENV=/opt/venv CUDA_HOME=/usr/local/cuda PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ENV PATH=/opt/venv/bin:$PATH

# Only the files with pins, metadata and commands, so that a change of the program does not recompile flash-attn.
WORKDIR /opt/lockstep
COPY tools/install_cuda.sh tools/
RUN bash tools/install_cuda.sh system
COPY setup.py ./
COPY rl/__init__.py rl/
RUN bash tools/install_cuda.sh packages
RUN bash tools/install_cuda.sh compiled

# The program last, in place: configs/ and tools/ are beside it, and a checkout mounted over /opt/lockstep replaces it. The
# directories are named so that no .venv and no runs/ of the checkout enter the image.
COPY setup.py train_rl.py README.md ./
COPY rl rl/
COPY launch launch/
COPY lockstep lockstep/
COPY configs configs/
COPY slurm slurm/
COPY tools tools/
COPY tests tests/
RUN bash tools/install_cuda.sh program
