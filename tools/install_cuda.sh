#!/usr/bin/env bash
# Install the CUDA stack (setup.py's extras) and Lockstep itself (editable) into a virtual environment: the active one, or
# .venv at the root of the repository, which is created if necessary. Dockerfile and lockstep.def call the same parts.
#
#   bash tools/install_cuda.sh               the packages and the program: wheels only, without a compiler or the CUDA toolkit
#   bash tools/install_cuda.sh --compiled    also the packages that are faster (docs/gpu.md), compiled for this machine's GPUs
#   bash tools/install_cuda.sh system        Ubuntu's packages, as root or in a build with --fakeroot
#   bash tools/install_cuda.sh packages      Python's packages that are wheels
#   bash tools/install_cuda.sh compiled      transformer-engine, flash-attn and apex
#   bash tools/install_cuda.sh program       the program; then checks the set
#
# With --compiled, or `compiled`:
#   CUDA_ARCHS="9.0;10.0"    GPU types to compile for, in torch's notation; 9.0 is Hopper (H100, H200, GH200), 10.0 is
#                            Blackwell (B200), 12.0 its workstation cards. One type makes the build much shorter.
#   MAX_JOBS=8               parallel compilers. One of flash-attn's takes several GB, so memory limits this before cores.
#   APEX_REF=none            a git ref of github.com/NVIDIA/apex to build. Megatron takes its fused Adam and gradient norms
#                            from transformer-engine, and from apex only without that. PyPI's `apex` is another project.
# Always:
#   PYTHON=python3.12        the interpreter of a .venv that is created
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
say() { echo "install_cuda: $*"; }
fail() {
    echo "install_cuda: $*" >&2
    exit 1
}

# g++ also serves torch.compile and Triton at run time. git: to build apex, and to note the revision of a run started from
# a mounted checkout. openmpi-bin: an MPI that srun --mpi=pmix can start; mpi4py finds its libmpi by itself. libibverbs1,
# ibverbs-providers, librdmacm1: NCCL loads them to reach InfiniBand and RoCE, and silently falls back to TCP if they are
# missing. numactl: vLLM binds memory. util-linux: lscpu, which vLLM runs.
system() {
    export DEBIAN_FRONTEND=noninteractive
    # apt downloads as the user _apt, which does not exist where an ordinary user builds the image.
    local apt=(apt-get -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" install -y --no-install-recommends \
        python3 python3-dev python3-venv g++ git ca-certificates openmpi-bin \
        libibverbs1 ibverbs-providers librdmacm1 numactl util-linux
    rm -rf /var/lib/apt/lists/*
}

venv="${VIRTUAL_ENV:-$root/.venv}"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

packages() {
    # A virtual environment, because Ubuntu's own Python rejects pip (PEP 668).
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    cd "$root"
    pip install ".[cuda,mpi,slurm,test,report]"
}

compiled() {
    export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" CUDA_ARCHS="${CUDA_ARCHS:-$(this_gpu)}" MAX_JOBS="${MAX_JOBS:-8}"
    [ -x "$CUDA_HOME/bin/nvcc" ] ||
        fail "$CUDA_HOME has no bin/nvcc; install the CUDA toolkit 13.0 and set CUDA_HOME, or leave out --compiled."
    cd "$root"
    say "compiling for $CUDA_ARCHS with $MAX_JOBS compilers"
    pip install ".[cuda-build]"
    # Headers of the cuDNN and NCCL in torch's own wheels, which are the libraries that the process loads.
    local nvidia
    nvidia="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
    export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}"
    export TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" FLASH_ATTN_CUDA_ARCHS="${CUDA_ARCHS//./}"
    # Both packages look for a ready wheel on GitHub first. Such wheels are for an exact torch and CUDA, and flash-attn 2.8
    # labels CUDA 13 builds as CUDA 12.
    export FLASH_ATTENTION_FORCE_BUILD=TRUE NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch NVCC_THREADS=2
    # --no-build-isolation: in an isolated build pip would fetch another torch and compile against it.
    pip install --no-build-isolation ".[cuda,compiled]"
    [ "${APEX_REF:-none}" = none ] || apex
}

apex() {
    local clone
    clone="$(mktemp -d)"
    git clone https://github.com/NVIDIA/apex "$clone"
    git -C "$clone" checkout "$APEX_REF"
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "$clone"
    rm -rf "$clone"
}

# The compute capabilities of this machine's GPUs; without a GPU, as in the build of an image, those of all supported types.
this_gpu() {
    local found
    found="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | paste -sd ';')" || found=
    echo "${found:-8.0;9.0;10.0;12.0}"
}

# Nothing is imported here, because vLLM and transformer-engine require the GPU's driver, which the build of an image does not have.
program() {
    pip install --no-deps -e "$root"
    pip check
}

case "${1:-}" in
"" | --compiled)
    packages
    [ -z "${1:-}" ] || compiled
    program
    ;;
system | packages | compiled | program) "$1" ;;
*) fail "unknown part '$1'; usage: bash tools/install_cuda.sh [--compiled|system|packages|compiled|program]" ;;
esac
