"""Lockstep: reinforcement learning on large language models as one SPMD program."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036, a shell without the environment may find the system's Python
    sys.exit(
        f"error: {sys.executable} is older than Python 3.11; activate the environment of Lockstep (source "
        ".venv/bin/activate), or make it with bash tools/install_cpu.sh."
    )

__version__ = "0.1.0"
