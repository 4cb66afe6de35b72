"""Batch sizes of vLLM's CUDA graphs, and the cache of its compiled code.

The cache is in a directory that several jobs may use at once (`rl.runtime.compile_caches`).
"""

import functools
import os
import socket

from rl.runtime.replacement import replace_attribute


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes of vLLM's CUDA graphs in ascending order; the last size is `largest`.

    An engine step of n samples runs the smallest graph that holds n samples: for example, 100 samples run the
    graph of size 104. From 64 samples on, at most an eighth of a graph is padding. By default vLLM captures
    sizes up to twice the number of concurrent samples, but at most 512; a larger step runs without a graph.
    """
    sizes, size = [1, 2, 4], 8
    while size < largest:
        sizes.append(size)
        size += max(8, 1 << size.bit_length() - 4)
    return [size for size in sizes if size < largest] + [largest]


@functools.cache
def replace_cache_files() -> None:
    """Make vLLM replace the index of its cache atomically, because another job may read it meanwhile.

    vLLM, Inductor and Triton already replace all other files atomically.
    """
    from vllm.compilation.backends import CompilerManager

    save = CompilerManager.save_to_file

    def save_to_file(self: CompilerManager) -> None:
        path = self.cache_file_path
        self.cache_file_path = f"{path}.{socket.gethostname()}.{os.getpid()}"
        save(self)
        if os.path.exists(self.cache_file_path):  # else nothing new was compiled
            os.replace(self.cache_file_path, path)
        self.cache_file_path = path

    replace_attribute(CompilerManager, "save_to_file", save_to_file)
