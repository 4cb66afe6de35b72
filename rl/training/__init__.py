"""The training engine on Megatron-core. Importing this package adapts Megatron to a host without CUDA."""

import warnings

from rl.training.cpu_support import install
from rl.training.cudnn import load_torchs_cudnn

warnings.filterwarnings("ignore", module=r"megatron\..*")  # meant for the library's developers
install()  # must precede the first import of megatron.core
load_torchs_cudnn()  # must precede the first import of transformer_engine, which Megatron imports
