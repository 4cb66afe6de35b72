"""A small image for tests of containers: programs and the Python of this machine with their libraries."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = (
    "sh bash cat ls ln mkdir dirname cp mv rm sleep id env ps grep test true touch chmod head seq tr printf "
    "timeout"
)
LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "__pycache__", "*.a")


def build_image(root: Path) -> Path:
    """Write the root directory of an image with a shell, coreutils and Python; return it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = Path(sys.base_prefix, "bin", version)
    shutil.copytree(
        Path(sys.base_prefix, "lib", version),
        root / "usr/lib" / version,
        ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"),
    )
    programs = {name: shutil.which(name) for name in PROGRAMS.split()}
    (root / "usr/bin").mkdir(parents=True)
    for name, path in programs.items():
        if path is not None:
            shutil.copy(path, root / "usr/bin" / name)
    shutil.copy(python, root / "usr/bin/python3")
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to("usr/bin" if name.endswith("bin") else "usr/lib")
    modules = list((root / "usr/lib" / version / "lib-dynload").glob("*.so"))
    for path in [*filter(None, programs.values()), python, *modules]:
        copy_libraries(path, root)
    for name in ("root", "etc", "app", "home"):
        (root / name).mkdir()
    return root


def copy_libraries(program: str | Path, root: Path) -> None:
    """Copy the shared libraries of a program to where its loader finds them."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    for library in re.findall(r"(?:=> )?(/\S+) \(0x", listed):
        loader = os.path.basename(library)
        for target in (
            root / "usr/lib" / loader,
            root / f"usr{library}" if library.startswith("/lib") else None,
        ):
            if target is not None and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(os.path.realpath(library), target)
