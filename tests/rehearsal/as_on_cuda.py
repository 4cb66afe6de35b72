"""train_rl.py with the defaults and branches of CUDA: `as_on_cuda.py <arguments of train_rl.py>`.

It trains and generates on the CPU with all that CUDA chooses by itself: gradients that are reduced during the
backward pass, a trainer in host memory while the engine generates, an engine that discards its weights when
it sleeps, freed outputs of pipeline stages, vLLM's own scheduler and sampler. `cuda_stand_in.py` has the
replacements, docs/gpu.md what they leave out.
"""

import os

import train_rl
from tests.rehearsal import cuda_stand_in


def main() -> None:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # of the process that this one was forked from
    cuda_stand_in.install()
    train_rl.leave(train_rl.main())


if __name__ == "__main__":
    main()
