"""One cuDNN per process: the cuDNN of torch's own packages."""

import ctypes
import importlib.util
import os
from pathlib import Path


def load_torchs_cudnn() -> None:
    """Load every library of torch's own cuDNN, for transformer-engine; do nothing if either is missing.

    transformer-engine is linked against cuDNN's eight libraries. torch loads only some of them. If the system
    has a cuDNN too, the loader takes the others from the system. Two versions in one process do not fit
    together: transformer-engine's import fails with an undefined symbol, or a later call returns
    CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH. A library that is already loaded is not searched for again.
    CUDNN_HOME tells transformer-engine where to look first.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # no package of NVIDIA's is installed
        return
    if found is None:
        return
    home = Path(next(iter(found.submodule_search_locations or ())))
    os.environ.setdefault("CUDNN_HOME", str(home))
    for library in sorted(home.glob("lib/libcudnn*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
