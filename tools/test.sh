#!/usr/bin/env bash
# Install what the tests need (nothing, when it is there) and run them in that environment.
#   bash tools/test.sh                             formatter, linter, type checker and all tests but the slow ones
#   bash tools/test.sh --slow                      all tests
#   bash tools/test.sh tests/unit/data -k packing  any pytest arguments
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash tools/install_cpu.sh --mpi

# tests/slurm starts a Slurm cluster on this machine and runs shellcheck, and tests of containers start some; without these programs its tests are skipped.
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge shellcheck charliecloud bubblewrap squashfs-tools)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v shellcheck && command -v ch-run && command -v bwrap; } >/dev/null; then
    echo "test: apt-get install ${packages[*]}"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } >/dev/null ||
        echo "test: they could not be installed (above); tests that need them will be skipped" >&2
fi

export VIRTUAL_ENV="${VIRTUAL_ENV:-$root/.venv}"
export PATH="$VIRTUAL_ENV/bin:$PATH" # tests start torchrun and mpiexec by name
export OMP_NUM_THREADS=1             # several ranks share the cores; OpenMP's spinning threads make them 20 times slower
export HF_HUB_OFFLINE=1              # a test that reaches for the hub is a bug: it fails at once instead of waiting
if [ $# = 0 ]; then
    ruff format --check --quiet . # names the files that `ruff format` would change
    ruff check --quiet .
    mypy
fi

# A whole suite runs its files side by side, one at a time per core and per 8 GiB: ranks wait more than they compute.
# Files stay in their order, in which the short ones of tests/unit come last and fill the gaps.
side_by_side=()
if [ $# = 0 ] || [ "$*" = --slow ]; then
    cores="$(env -u OMP_NUM_THREADS nproc)" # nproc heeds that variable
    memory="$(awk '/^MemTotal/ {print int($2 / 8388608)}' /proc/meminfo)"
    workers=$((memory < cores ? memory : cores))
    [ "$workers" -lt 2 ] || side_by_side=(--numprocesses "$workers" --max-worker-restart 0 --dist loadfile --no-loadscope-reorder)
fi
exec python -m pytest "${side_by_side[@]}" "$@"
