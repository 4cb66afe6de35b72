"""The directory of compile caches on the node's own disk, whose name other users of the node can predict.

Later runs unpickle and execute what compilers store there. A directory that another user made, or can
write to, is therefore not used.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

ROOT = "LOCKSTEP_CACHE"
"""Environment variable that names the directory; slurm/job.sh sets it."""
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable whose default is a predictable name in the temporary directory; Triton's and vLLM's
defaults are in the home directory."""
CACHES = ("TRITON_CACHE_DIR", INDUCTOR, "VLLM_CACHE_ROOT")


def use_private_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make the directory of caches for this user alone; use a new one if others could have written to it."""
    default = os.path.join(tempfile.gettempdir(), f"lockstep-cache-{os.geteuid()}")
    root = environ.get(ROOT) or default
    environ.setdefault(INDUCTOR, f"{root}/inductor")
    below = [name for name in CACHES if environ.get(name, "").startswith(f"{root}/")]
    if not below or not (reason := _why_unsafe(root)):
        return
    fresh = tempfile.mkdtemp(prefix="lockstep-cache-")
    log.warning("compile caches are in %s, and start empty: %s %s", fresh, root, reason)
    for name in below:
        environ[name] = fresh + environ[name].removeprefix(root)


def _why_unsafe(root: str) -> str:
    """Make the directory if it is missing; return why its contents cannot be trusted, or ""."""
    try:
        above = os.stat(os.path.dirname(root))
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            return "is in a directory in which every user can replace it"
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, 0o700)
        found = os.lstat(root)
        if not stat.S_ISDIR(found.st_mode):
            return "is a link or a file"
        if found.st_uid != os.geteuid():
            return f"belongs to user {found.st_uid}"
        if found.st_mode & 0o022:
            return "can be written by other users"
        os.chmod(root, 0o700)
    except OSError as error:
        return f"cannot be used: {error}"
    return ""
