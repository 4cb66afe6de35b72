#!/usr/bin/env bash
# Install what the tests need (nothing, when it is there) and run pytest in that environment.
#   bash tools/test.sh                        all tests but the slow ones
#   bash tools/test.sh --slow                 all tests
#   bash tools/test.sh tests/data -k packing  any pytest arguments
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash tools/install_cpu.sh --mpi

export VIRTUAL_ENV="${VIRTUAL_ENV:-$root/.venv}"
export PATH="$VIRTUAL_ENV/bin:$PATH" # tests start torchrun and mpiexec by name
export OMP_NUM_THREADS=1             # several ranks share the cores; OpenMP's spinning threads make them 20 times slower
export HF_HUB_OFFLINE=1              # a test that reaches for the hub is a bug: it fails at once instead of waiting
exec python -m pytest -o testpaths=tests "$@"
