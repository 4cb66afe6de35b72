"""Runs drawn at random: a layout, an algorithm, and the samples or data that it learns from.

A draw is a function of SEED and its number. `run.mode=train_only` replays the samples, so that they can have
any lengths; algorithms that learn from data read a file.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rl.config.declarations import shipped
from rl.config.exclusions import check_exclusions
from rl.config.objective import LOSSES
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.objectives.aggregate import MODES
from rl.objectives.kl import ESTIMATORS
from rl.run.rollout_writer import FILE_COLUMNS, columns_of, stored_arrays
from rl.run_directory.rollout_files import RolloutLog
from tests.checkpoints import SIZES, save_tiny

SEED = 2026
STEPS = 2
FROM_DATA = ("sft", "dpo", "distill", "kto", "orpo", "simpo")
ALGORITHMS = ("grpo", "distill", "ppo", *FROM_DATA, "dapo", "prime", "sppo", "rloo", "remax", "reinforce_pp")
"""Every shipped algorithm but spin, because spin's pairs are half generated, half data."""
assert {*ALGORITHMS, "spin"} == set(shipped())
GROUPED = ("grpo", "dapo", "rloo", "prime", "sppo")
"""Algorithms that compare the samples of a group."""
VOCAB = range(6, 102)
"""Ids of the tokens of tests/checkpoints.py that are characters."""
MAX_TOKENS = 24
"""Longest response."""
LOSS_OPTIONS = {
    "ppo": ["objective.dual_clip=1.3"],
    "clip-cov": ["objective.cov_fraction=0.1", "objective.cov_low=0.2", "objective.cov_high=3.0"],
    "kl-cov": ["objective.cov_fraction=0.1", "objective.kl_cov_coef=0.7"],
}
TERMS = (
    [],
    ["objective.kl_coef=0.1", "objective.entropy_coef=0.05"],
    ["objective.off_policy_mask=0.05"],
    ["objective.top_entropy=0.2"],
    ["rollout_correction.truncate_tokens=1.5", "objective.kl_coef=0.1"],
)
"""Terms of the loss of a policy gradient besides the objective."""
FIXED = """
run.mode=train_only training.optimizer.lr=0.01 training.optimizer.eps=1 training.optimizer.clip_grad=0
validation.every=0
model.dtype=float32 logging.tensorboard=false logging.rollouts=none data.shuffle=false
data.response_key=completion data.max_prompt_tokens=64
""".split()
"""An epsilon as large as a gradient: a step does not enlarge rounding errors."""
ONE_RANK = {
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "ep": 1,
    "etp": 0,
    "shared_prefix": "false",
    "recompute": "none",
    "overlap_gradients": "off",
    "head_chunk_tokens": 0,
    "micro_batch_tokens": 10**6,
}


@dataclass
class Draw:
    world_size: int
    layout: dict[str, object]
    """Keys of the section training that must not change results."""
    overrides: list[str]
    """Further keys of the config."""

    def command(self, layout: dict[str, object], run: Path) -> list[str]:
        """Return the arguments of train_rl.py. run: the run directory, beside which a config is written."""
        config = run.with_suffix(".yaml")
        config.write_text(f"run: {{name: draw, max_steps: {STEPS}, dir: {run}}}\n")
        keys = [f"training.{name}={value}" for name, value in layout.items()]
        return ["--config", str(config), *FIXED, *self.overrides, *keys]


def save_models(directory: Path) -> None:
    """Save the models of all draws."""
    directory.mkdir()
    save_tiny("Qwen2ForCausalLM", directory / "dense", seed=1)
    save_tiny("Qwen2ForCausalLM", directory / "tied", seed=2, tie=True)
    save_tiny("Qwen3MoeForCausalLM", directory / "mixture", seed=3)
    save_tiny("Qwen2ForCausalLM", directory / "teacher", seed=4, hidden_size=64, num_hidden_layers=3)


def draw(number: int, models: Path, directory: Path) -> Draw:
    """Return a draw, after writing what it learns from to the directory."""
    rng = random.Random(f"{SEED} {number}")
    algorithm = ALGORITHMS[number % len(ALGORITHMS)]
    model, critic = rng.choice(["dense", "tied", "mixture", "mixture"]), rng.choice(["", "dense", "mixture"])
    has_experts = model == "mixture" or (algorithm, critic) == ("ppo", "mixture")
    world_size, layout = rng.choice(layouts(has_experts=has_experts))
    dp = world_size // (layout["tp"] * layout["pp"])
    layout["cp"] = random.Random(f"cp {SEED} {number}").choice([1, 2]) if dp % 2 == 0 else 1
    dp //= layout["cp"]
    if not has_experts:
        layout["sequence_parallel"] = rng.choice(["true", "false"])
    layout |= {name: rng.choice(["true", "false"]) for name in ("shared_prefix", "recompute")}
    kinds = random.Random(f"recompute {SEED} {number}").choice(["selective", "full"])
    layout["recompute"] = "none" if layout["recompute"] == "false" else kinds
    layout["overlap_gradients"] = rng.choice(["on", "off"])
    layout["head_chunk_tokens"] = rng.choice([0, 5, 30])
    is_data, per_prompt = algorithm in FROM_DATA, rng.randint(1, 4)
    if algorithm in GROUPED:
        per_prompt = max(per_prompt, 2)
    num_prompts = rng.randint(max(dp, 2) if is_data else 1, 5)
    # A config must have a sample for every rank. Stored steps may have fewer, for example dapo's.
    drawn = num_prompts if is_data else 8
    minibatch = rng.choice([0, 0, *(n for n in range(1, drawn) if drawn % n == 0 and n * per_prompt >= dp)])
    overrides = [
        f"algorithm={algorithm}",
        f"model.path={models / model}",
        f"data.train=[{directory / 'data.parquet'}]",
        f"data.prompts_per_step={drawn}",
        f"training.prompts_per_minibatch={0 if is_data and minibatch * dp < dp * dp else minibatch}",
        f"rollout.max_response_tokens={MAX_TOKENS}",
    ]
    sampling = [
        f"rollout.samples_per_prompt={per_prompt}",
        f"rollout.temperature={rng.choice([1.0, 0.8])}",
        "rollout.cpu_kv_cache_mib=16",
    ]
    if algorithm == "distill" or not is_data:  # others would refuse them
        overrides += sampling
    overrides += [
        f"training.epochs={rng.choice([1, 1, 2])}",
        *options(algorithm, number // len(ALGORITHMS), rng, models, has_experts=model == "mixture"),
    ]
    if "training.router_replay=old_policy" in overrides and layout["recompute"] == "selective":
        layout["recompute"] = "full"  # a pass would replay the experts of another micro-batch
    if algorithm == "ppo" and critic:
        overrides.append(f"critic.path={models / critic}")
    if rng.random() < 0.2:
        more = random.Random(f"adapter {SEED} {number}")
        overrides += [f"adapter.kind={more.choice(['lora', 'rslora', 'dora'])}", "adapter.rank=4"]
        if algorithm == "ppo" and not critic:
            overrides.append("critic.share_base=true")
    if is_data:
        overrides.append("run.mode=train")
    else:
        overrides.append(f"run.rollouts={directory}")
        has_rows = algorithm == "grpo" and rng.random() < 0.5
        tokens = save_samples(directory, rng, num_prompts, per_prompt, has_rows=has_rows)
    total = save_data(directory, rng, num_prompts * STEPS if is_data else drawn)
    layout["micro_batch_tokens"] = int((total if is_data else tokens) ** rng.random())
    return Draw(world_size, layout, overrides)


def layouts(*, has_experts: bool) -> list[tuple[int, dict[str, object]]]:
    """Return world size and layout of all grids of 2 to 4 ranks."""
    found = []
    for world_size in (2, 3, 4):
        for tp, pp in ((1, 1), (1, 2), (2, 1), (2, 2)):
            if world_size % (tp * pp):
                continue
            dp = world_size // (tp * pp)
            # Layouts that divide both batch and model are drawn more often.
            found += [(world_size, {"tp": tp, "pp": pp}) for _ in range(1 + 2 * (dp > 1 and tp * pp > 1))]
            for ep in (2, 4) if has_experts else ():
                for etp in (1, tp)[:tp]:
                    if world_size % (pp * ep * etp) == 0:
                        found.append((world_size, {"tp": tp, "pp": pp, "ep": ep, "etp": etp}))
    return found


def options(algorithm: str, turn: int, rng: random.Random, models: Path, *, has_experts: bool) -> list[str]:
    """Return keys of the algorithm. turn: number of its draws before this one."""
    teacher = f"teacher.path={models / 'teacher'}"
    if algorithm == "distill":
        limit = ["teacher.max_prompt_tokens=64"]
        kinds: tuple[list[str], ...] = (
            [teacher],
            [teacher, "teacher.top_k=5", "teacher.divergence=forward_kl"],
            [teacher, f"teacher.sources={{odd: {models / 'dense'}}}", "teacher.divergence=jensen_shannon"],
            ["teacher.self_taught=present", "teacher.template='{ground_truth}{prompt}'", *limit],
            ["teacher.self_taught=initial", "teacher.template='{prompt}{ground_truth}'", *limit],
        )
        return ["teacher.student_share=0", *kinds[turn % len(kinds)]]
    if algorithm in ("ppo", "prime"):
        # prime whitens small differences from the reference, which must be larger than rounding errors.
        section, lr = {"ppo": ("critic", 0.01), "prime": ("implicit_reward", 0.3)}[algorithm]
        return [f"{section}.optimizer.{key}" for key in (f"lr={lr}", "eps=1", "clip_grad=0")]
    if algorithm in ("sppo", *FROM_DATA):
        found = {
            "sft": ["validation.loss=false"],
            "dpo": [f"preference.loss={('sigmoid', 'hinge', 'ipo')[turn % 3]}"],
            "kto": ["preference.desirable_weight=1.3"],
        }
        return found.get(algorithm, [])
    found = ["objective.reward_kl.coef=0.1"] if algorithm == "remax" else []
    if algorithm == "grpo":
        combinations = [(loss, mode) for loss in LOSSES for mode in MODES]
        loss, mode = combinations[turn * 7 % len(combinations)]
        found = [f"objective.loss={loss}", f"objective.aggregation={mode}", *LOSS_OPTIONS.get(loss, [])]
        terms = [*rng.choice(TERMS), f"objective.kl_estimator={rng.choice(list(ESTIMATORS))}"]
        if not fits(found):
            found = [f"objective.loss={loss}", *LOSS_OPTIONS.get(loss, [])]
        if fits([*found, *terms]):
            found += terms
    if has_experts and rng.random() < 0.3:
        found.append("training.router_replay=old_policy")
    return found


def fits(keys: list[str]) -> bool:
    try:
        check_exclusions(
            load_config(None, ["model.path=toy", "data.train=toy.jsonl", "algorithm=grpo", *keys])
        )
    except ConfigError:
        return False
    return True


def save_data(directory: Path, rng: random.Random, count: int) -> int:
    """Write rows with a prompt, responses and a label; return their number of tokens."""

    def text(most: int) -> str:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(0, most)))

    rows = [
        {
            "prompt": "p" + text(12),
            "completion": text(MAX_TOKENS - 1),
            "chosen": text(MAX_TOKENS - 1),
            "rejected": text(MAX_TOKENS - 1),
            "label": rng.random() < 0.5,
            "data_source": rng.choice(["even", "odd"]),
            "reward_model": {"ground_truth": text(5)},
        }
        for _ in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "data.parquet")
    return sum(len(row["prompt"] + row["chosen"] + row["rejected"]) for row in rows) // STEPS


def save_samples(
    directory: Path, rng: random.Random, num_prompts: int, per_prompt: int, *, has_rows: bool
) -> int:
    """Store the samples of each step; return the largest number of tokens of a step.

    has_rows: divide some samples into rows with prompts of their own.
    """
    log = RolloutLog(
        directory, FILE_COLUMNS, kind="all", token_texts=lambda: [str(i) for i in range(VOCAB.stop)]
    )
    largest, empty = 1, rng.choice([0.0, 0.3, 0.6, 0.8])
    for step in range(1, STEPS + 1):
        batch = samples(rng, num_prompts, per_prompt, empty=empty, has_rows=has_rows)
        arrays = stored_arrays(batch, batch)
        columns = partial(columns_of, step, batch, list(range(len(batch))), arrays, decode)
        log.write(step, columns)
        largest = max(largest, int(batch.prompt_lengths.sum() + batch.lengths.sum()))
    log.close()
    return largest


def decode(ids: Sequence[np.ndarray], special: bool) -> list[str]:
    return ["".join(map(chr, own)) for own in ids]


def samples(rng: random.Random, num_prompts: int, per_prompt: int, *, empty: float, has_rows: bool) -> Batch:
    """Return a batch as `collect` returns it. empty: share of the samples without a token."""

    def tokens(count: int) -> np.ndarray:
        return np.array(rng.choices(VOCAB, k=count), np.int32)

    prompts = [
        Prompt(k, tokens(rng.randint(1, 20)), f"{k} is", rng.choice(["even", "odd"]), "yes", {})
        for k in range(num_prompts)
    ]
    owners, trajectories, prompt_ids, response_ids = [], [], [], []
    for sample in range(num_prompts * per_prompt):
        prompt = prompts[sample // per_prompt]
        for row in range(rng.randint(1, 3) if has_rows else 1):
            owners.append(sample // per_prompt)
            trajectories.append(sample)
            prompt_ids.append(prompt.token_ids if row == 0 else tokens(rng.randint(1, 20)))
            response_ids.append(tokens(0 if rng.random() < empty else rng.randint(1, MAX_TOKENS)))
    lengths = [len(ids) for ids in response_ids]
    number, total = num_prompts * per_prompt, sum(lengths)
    # The first two samples of a group differ: dapo has no other groups.
    of_samples = torch.tensor([rng.choice([0.0, 0.5]) + (k % per_prompt == 1) for k in range(number)])
    scores = of_samples[trajectories]
    return Batch(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        groups=torch.tensor(owners),
        truncated=torch.tensor([length == MAX_TOKENS for length in lengths]),
        prompts=prompts,
        trajectories=torch.tensor(trajectories) if has_rows else None,
        mask=torch.tensor([float(rng.random() < 0.8) for _ in range(total)]),
        rollout_logprobs=torch.tensor([-rng.gammavariate(9.0, 0.5) for _ in range(total)]),
        scores=scores,
        rewards=scores.clone(),
        extra={"labels": (scores > 0.4).float(), "baselines": torch.rand(num_prompts)[owners]},
        score_details={"failed": torch.zeros(len(lengths))},
    )


WIDTH, LAYERS = SIZES["hidden_size"], SIZES["num_hidden_layers"]
