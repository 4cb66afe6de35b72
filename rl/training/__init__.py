"""The training engine on Megatron-core. Importing this package prepares Megatron for a host without CUDA."""

from rl.training.cpu_support import install

install()  # before the first import of megatron.core, by any module of this package
