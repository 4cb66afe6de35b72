"""parity_worker.py with training.backend=transformers."""

import sys
from dataclasses import replace

import parity_worker
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.schema import Config
from rl.models import by_class, read_hf_config

own_config, own_model = parity_worker.config_of, AutoModelForCausalLM.from_pretrained


def config_of(*args, **kwargs) -> Config:
    config = own_config(*args, **kwargs)
    return replace(config, training=replace(config.training, backend="transformers"))


def model_of(path: str, **options):
    """The model that vLLM computes; its default attention does not cap scores."""
    config = AutoConfig.from_pretrained(path)
    by_class.correct(config)
    return own_model(path, config=config, attn_implementation="eager", **options)


if __name__ == "__main__":
    parity_worker.config_of = config_of
    parity_worker.read_hf_config = lambda path: by_class.described(read_hf_config(path))
    AutoModelForCausalLM.from_pretrained = model_of
    parity_worker.main(*sys.argv[1:])
