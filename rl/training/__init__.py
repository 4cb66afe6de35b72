"""The training engine on Megatron-core. Importing this package adapts Megatron to a host without CUDA."""

from rl.training.cpu_support import install

install()  # must precede the first import of megatron.core
