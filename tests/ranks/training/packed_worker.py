"""parity_worker.py with linear layers that vLLM's CPU build packs as it does by itself: their weights are
then empty tensors, and the values in a form of oneDNN's."""

import sys

import parity_worker

from rl.rollout import cpu_support


def keep_head_alive() -> None:
    """As `cpu_support` does for all: the head stays a tensor beside the packed copy that is computed with."""
    import torch
    import vllm.model_executor.layers.utils as layers

    pack = layers.dispatch_cpu_unquantized_gemm

    def pack_what_is_removed(layer, remove_weight):
        if remove_weight:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = pack_what_is_removed


if __name__ == "__main__":
    cpu_support._keep_weights_alive = keep_head_alive
    parity_worker.main(*sys.argv[1:])
