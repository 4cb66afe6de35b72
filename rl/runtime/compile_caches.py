"""Directories of compile caches that no other user can write to.

Other users can predict the name of the default directory on the node's own disk. Later runs unpickle and
execute what compilers store in a cache. A directory that another user made, or can write to, is therefore not
used.
"""

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping

from rl.sandbox.private_directory import why_untrusted

log = logging.getLogger(__name__)

ROOT = "LOCKSTEP_CACHE"
"""Environment variable that names the directory; slurm/job.sh sets it."""
PREDICTABLE = ""
"""Default of a cache whose own default is predictable, for example /tmp/torchinductor_alice."""
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": ("inductor", PREDICTABLE),
    "CUTE_DSL_CACHE_DIR": ("cute", PREDICTABLE),
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": ("flash-attention", PREDICTABLE),
    "QUACK_CACHE_DIR": ("quack", PREDICTABLE),
    "XDG_CACHE_HOME": ("", "~/.cache"),
    "TRITON_CACHE_DIR": ("triton", "~/.triton/cache"),
    "VLLM_CACHE_ROOT": ("vllm", "{XDG_CACHE_HOME}/vllm"),
    "FLASHINFER_WORKSPACE_BASE": ("flashinfer", "~"),
    "TORCH_EXTENSIONS_DIR": ("extensions", "{XDG_CACHE_HOME}/torch_extensions"),
    "CUDA_CACHE_PATH": ("cuda", "~/.nv/ComputeCache"),
    "TVM_FFI_CACHE_DIR": ("tvm", "~/.cache/tvm-ffi"),
    "TILELANG_CACHE_DIR": ("tilelang", "~/.tilelang/cache"),
    "HUMMING_CACHE_DIR": ("humming", "~/.humming/cache"),
}
"""Environment variables that name caches, each with its folder in LOCKSTEP_CACHE and with its default.

The folder is "" if the cache also has files that a job does not compile. DeepGEMM's is in vLLM's cache."""


def use_private_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make the directory of caches for this user alone, and with LOCKSTEP_CACHE put all caches there.

    A cache that others could write is not used; it is replaced by a new directory. Raises ValueError if
    others could replace a new directory, too.
    """
    temporary = tempfile.gettempdir()
    if reason := why_untrusted(temporary, trusts_group=True, is_shared=True):
        raise ValueError(
            f"TMPDIR={temporary}: {reason}, who could replace what programs write there and execute; set "
            "TMPDIR to a directory of yours, or `chmod +t` it."
        )
    root = environ.get(ROOT) or os.path.join(temporary, f"lockstep-cache-{os.geteuid()}")
    for name, (folder, default) in CACHES.items():
        if folder and (environ.get(ROOT) or default == PREDICTABLE):
            environ.setdefault(name, f"{root}/{folder}")
    fresh = ""
    known: dict[str, str] = {}
    for name, (_, default) in CACHES.items():
        place = known[name] = environ.get(name) or os.path.expanduser(default.format_map(known))
        is_below = place.startswith(f"{root}/")
        if reason := _why_unsafe(root) if is_below else why_untrusted(place):
            fresh = fresh or tempfile.mkdtemp(prefix="lockstep-cache-")
            known[name] = environ[name] = fresh + (place.removeprefix(root) if is_below else f"/{name}")
            log.warning("%s: compile caches are in %s, and start empty: %s", name, fresh, reason)


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
