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

from rl.runtime.private_directory import why_untrusted

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
    log.warning("compile caches are in %s, and start empty: %s", fresh, reason)
    for name in below:
        environ[name] = fresh + environ[name].removeprefix(root)


def _why_unsafe(root: str) -> str:
    """Make the directory if it is missing; return why its contents cannot be trusted, or ""."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, 0o700)
        if not stat.S_ISDIR(os.lstat(root).st_mode):
            return f"{root} is a link or a file"
        if not (reason := why_untrusted(root)) and os.stat(root).st_uid == os.geteuid():
            os.chmod(root, 0o700)
        if not reason and not os.access(root, os.W_OK):
            return f"{root} cannot be written"
        return reason
    except OSError as error:
        return f"{root} cannot be used: {error}"
