"""Import of transformers without its scan of all model files.

At import, transformers 5 reads every file of every model to find out which file defines which class: 3,200
files and 70 MB per rank, at every start. The result depends only on the installation, so it is cached in a
file in the user's cache directory.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from rl.runtime.plain_data import decode, encode
from rl.sandbox.private_directory import why_untrusted

_MODULE, _FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"


def keep_scan() -> None:
    """Make the next import of transformers use the cached result of its scan, or cache it. Idempotent."""
    if _MODULE not in sys.modules and not any(
        isinstance(finder, _TransformersFinder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _TransformersFinder())


def cached_scan(scan: Callable[[str], dict], path: str | os.PathLike) -> dict:
    """Return `scan(path)`, from the cache if possible. A change of the directory invalidates the cache."""
    directory = Path(path)
    directory = directory.parent if directory.is_file() else directory
    if directory.name != "models":  # a single model: its few files are read if it is used
        return scan(path)  # type: ignore[arg-type]
    times = [file.stat().st_mtime_ns for file in (directory, directory.parent / "__init__.py")]
    key = hashlib.sha256(repr((str(directory), times, sys.implementation.cache_tag)).encode()).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    file = Path(root, "lockstep", "transformers-plain", key)
    with contextlib.suppress(OSError):  # with a read-only home directory, every start scans
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if why_untrusted(file.parent):  # the result names modules, which transformers then imports
        return scan(path)  # type: ignore[arg-type]
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # absent or truncated: scan again
        return decode(file.read_bytes())
    found = scan(path)  # type: ignore[arg-type]
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
            partial.write(encode(found))
        os.replace(partial.name, file)
    return found


class _TransformersFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                scan = getattr(module, _FUNCTION, None)  # other versions of transformers may not have it
                if scan is not None:
                    setattr(module, _FUNCTION, lambda path: cached_scan(scan, path))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
