"""parity_worker.py with training.backend=transformers."""

import sys
from dataclasses import replace
from functools import partial

import parity_worker
from transformers import AutoModelForCausalLM

from rl.config.schema import Config
from rl.models import by_class, read_hf_config

own_config = parity_worker.config_of


def config_of(*args, **kwargs) -> Config:
    config = own_config(*args, **kwargs)
    return replace(config, training=replace(config.training, backend="transformers"))


if __name__ == "__main__":
    parity_worker.config_of = config_of
    parity_worker.read_hf_config = lambda path: by_class.described(read_hf_config(path))
    # Its default attention does not cap scores.
    eager = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
    AutoModelForCausalLM.from_pretrained = eager
    parity_worker.main(*sys.argv[1:])
