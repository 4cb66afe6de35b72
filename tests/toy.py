"""The toy task of runs in tests, their config, and how they are started."""

from pathlib import Path

import yaml

from tests.records import records
from tests.spawn import ROOT, run_ranks

TRAIN = ROOT / "train_rl.py"
ON_CUDA = ROOT / "tests" / "rehearsal" / "as_on_cuda.py"
"""The same program with the defaults and branches of CUDA."""
ON_TE = ROOT / "tests" / "rehearsal" / "as_on_te.py"
"""The program with the defaults of CUDA and Transformer Engine's layers, for models in bfloat16."""
ROWS = {"train": 512, "test": 64, "pairs": 64, "labels": 64}
"""Rows of each file; reading thousands takes a rank a second."""
REWARD = '''
def score(prompt, response, ground_truth, **extra):
    """Give different samples of an untrained model, which is never right, different scores."""
    value = len(set(response)) / 6
    return {"score": value, "acc": float(value > 0.5), "spread": value, "length": len(response) / 6}


def same(prompt, response, ground_truth, **extra):
    return 1.0
'''
CONFIG = """
algorithm: grpo
run: {name: test, max_steps: 2, dir: DIRECTORY/run}
model: {path: TOY/model, dtype: float32}
data: {train: [TOY/train.parquet], max_prompt_tokens: 16, prompts_per_step: 8}
training: {micro_batch_tokens: 200, prompts_per_minibatch: 4, optimizer: {lr: 1.0e-3}}
rollout: {samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}
reward: {function: "TOY/reward.py:score", workers: 1}
validation: {every: 0}
logging: {tensorboard: false}
"""
UNSCORED = ("reward.function=rl.rewards.exact:score", "reward.workers=0")
"""Overrides that set the keys of `reward` in CONFIG to their defaults, for a run that scores nothing."""
FROM_DATA = (
    "rollout.samples_per_prompt=8",
    "rollout.deterministic=false",
    "rollout.cpu_kv_cache_mib=512",
    *UNSCORED,
)
"""Overrides that also set the keys of `rollout` to their defaults, for a run that generates nothing."""
SFT = ("algorithm=sft", "training.prompts_per_minibatch=0", *FROM_DATA)
"""Overrides for a supervised run, which is the fastest."""


def save_toy(directory: Path) -> Path:
    """Write model, data and reward functions; return the directory."""
    import pyarrow.parquet as pq

    from tools.make_toy import make_toy  # imports torch, which is not for every test's conftest.py

    make_toy(directory, layers=2, intermediate=128)
    for name, count in ROWS.items():
        path = directory / f"{name}.parquet"
        pq.write_table(pq.read_table(path).slice(0, count), path)
    (directory / "reward.py").write_text(REWARD)
    return directory


def write_config(directory: Path, toy: Path, *overrides: str) -> Path:
    """Write CONFIG with KEY=VALUE overrides to directory/config.yaml; return the file."""
    config = yaml.safe_load(CONFIG.replace("DIRECTORY", str(directory)).replace("TOY", str(toy)))
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    path = directory / "config.yaml"
    path.write_text(yaml.dump(config))
    return path


def train(
    world_size: int,
    config: Path,
    *overrides: str,
    run: Path | None = None,
    timeout: float = 400,
    program: Path = TRAIN,
) -> list[dict]:
    """Run the program on ranks of this host; return the records in its run directory.

    run: the run directory; the default is `run` beside the config. program: TRAIN, ON_CUDA or ON_TE.
    """
    directory = config.parent / "run" if run is None else run
    arguments = ("--config", config, f"run.dir={directory}", *overrides)
    # Megatron looks for Transformer Engine when it is imported, which the fork server has done.
    run_ranks(world_size, program, *arguments, timeout=timeout, fresh=program == ON_TE)
    return records(directory)
