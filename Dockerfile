# The CUDA stack of Lockstep. This file pins no Python package: the versions are in setup.py's `cuda` extra, and
# tests/unit/test_packaging.py checks this file against it.
#
#   docker build -t lockstep .
#   docker build -t lockstep --build-arg CUDA_ARCHS="9.0" --build-arg MAX_JOBS=32 .     one GPU type: a much shorter build
#   docker build -t lockstep --build-arg APEX_REF=master .                               with NVIDIA's apex
#
# On a cluster convert it once (enroot import, apptainer build); slurm/site.example.sh shows how batch files use it.

# CUDA 13.0, because torch and vLLM on PyPI are built for it; `devel` for nvcc, which compiles flash-attn. Not the
# `cudnn` variant: transformer-engine loads a system cuDNN before the one torch ships, and two versions in one process fail.
# Ubuntu 24.04 has Python 3.12 and a GCC that nvcc 13 supports.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# GPU types to compile for, in torch's notation. 9.0 is Hopper, 10.0 is Blackwell (B200), 12.0 its workstation cards.
ARG CUDA_ARCHS="8.0;9.0;10.0;12.0"
# Number of parallel compilers. One of flash-attn's takes several GB, so memory limits this before cores.
ARG MAX_JOBS=8
# A git ref of github.com/NVIDIA/apex; empty leaves it out. Megatron takes its fused Adam and gradient norms from
# transformer-engine, and from apex only without that. PyPI's `apex` is another project: never install it.
ARG APEX_REF=""

# git: to build apex, and to note the revision of a run started from a mounted checkout. g++ also serves torch.compile and
# Triton at run time. openmpi-bin: an MPI that srun --mpi=pmix can start; mpi4py finds its libmpi by itself. libibverbs1,
# ibverbs-providers, librdmacm1: NCCL loads them to reach InfiniBand and RoCE, and silently falls back to TCP if they
# are missing. numactl: vLLM binds memory. util-linux: lscpu, which vLLM runs.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv g++ git ca-certificates openmpi-bin \
        libibverbs1 ibverbs-providers librdmacm1 numactl util-linux \
    && rm -rf /var/lib/apt/lists/*

# A virtual environment, because Ubuntu's own Python rejects pip (PEP 668).
ENV VIRTUAL_ENV=/opt/venv CUDA_HOME=/usr/local/cuda PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

# Only the files with pins and metadata, so that a change of the program does not recompile flash-attn.
WORKDIR /opt/lockstep
COPY setup.py ./
COPY rl/__init__.py rl/

# torch first: flash-attn and transformer-engine's torch part import it in their setup.py.
RUN pip install ".[cuda-build]"

# --no-build-isolation: in an isolated build pip would fetch another torch and compile against it. Both packages look for a
# ready wheel on GitHub first; the build is forced, because such wheels are for an exact torch and CUDA, and flash-attn 2.8
# labels CUDA 13 builds as CUDA 12. CPATH: the headers of the cuDNN and NCCL in torch's own wheels, which are the libraries
# that the process loads.
RUN nvidia="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia" \
    && export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include" \
    && export TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" FLASH_ATTN_CUDA_ARCHS="$(echo "$CUDA_ARCHS" | tr -d .)" \
        FLASH_ATTENTION_FORCE_BUILD=TRUE NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch \
        MAX_JOBS="$MAX_JOBS" NVCC_THREADS=2 \
    && pip install --no-build-isolation ".[cuda,mpi,slurm,test,report]"

RUN if [ -n "$APEX_REF" ]; then \
        git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_REF" \
        && TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" MAX_JOBS="$MAX_JOBS" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
            pip install --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

# The program last, in place: configs/ and tools/ are beside it, and a checkout mounted over /opt/lockstep replaces it. The
# directories are named so that no .venv and no runs/ of the checkout enter the image. Nothing is imported here, because
# transformer-engine requires the GPU's driver, which a build does not have; `pip check` checks the set instead.
COPY setup.py train_rl.py README.md ./
COPY rl rl/
COPY launch launch/
COPY configs configs/
COPY slurm slurm/
COPY tools tools/
COPY tests tests/
RUN pip install --no-deps --no-build-isolation -e . && pip check
