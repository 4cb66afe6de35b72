"""Run features together: random pairs and triples, each as a short run of the program with all checks on.

    python -m tests.matrix                                     200 pairs and 60 triples
    python -m tests.matrix --pairs 20 --triples 0 --seed 3
    python -m tests.matrix --only agents                       every drawn combination has this feature
    python -m tests.matrix --list                              count the pairs that are accepted and refused
    python -m tests.matrix agents roles                        this combination
    python -m tests.matrix --on-cuda --ranks 4 --pairs 50      with CUDA's defaults and branches, four ranks

Two ranks, 3 steps of a tiny model. A combination is drawn only if no table refuses it. It fails if the
program fails, or if a metric is not finite or not documented. A part of the runs is resumed from the
checkpoint of step 2; it fails if a deterministic one then has other metrics. Exit code 0 if none has failed.
What a GPU refuses (`rl.engines.rollout_engines.check_device`) is printed as such with --on-cuda.
"""

import argparse
import itertools
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.role_checks import role_ranks
from rl.config.schema import load_config
from rl.config.sweep_checks import load_points
from tests.records import comparable, records
from tests.spawn import ROOT, RanksFailed
from tests.toy import ON_CUDA, TRAIN, train, write_config

RANKS = 2
DATA = ("model.path=m", "data.train=[d]")
STEPS = 3
RESUMED = 0.5
"""Share of the runs that are resumed."""
SAVES = ("checkpoint.every=2", "checkpoint.keep_last=0")
GAME = f"agents.environment={ROOT / 'tests' / 'runs' / 'agent_game.py'}:Echo"
AGENTS = f"{GAME} agents.max_tokens_per_turn=6 agents.workers=1 rollout.max_response_tokens=40"
CORRECT = "rollout_correction.truncate_tokens=2.0"
TWO_ROLES = "roles.train=0-0 roles.rollout=1-1"
ROLES = f"{TWO_ROLES} {CORRECT}"
IN_FLIGHT = f"{ROLES} roles.refit_after_steps=4"
UNSCORED = "reward.function=rl.rewards.exact:score reward.workers=0"
EXPERTS = "model.path=DIR/experts"
LORA = "adapter.kind=lora adapter.rank=4"
ALTERNATIVES = "one key, two values"
MORE_RANKS = "more ranks than two"
FOR_CPU = " is for CPU: on a GPU "
"""Part of the error for a key that only a CPU run accepts."""
BESIDE = f"{LORA} adapter.in_engine=adapter adapter.targets=[q_proj,k_proj,v_proj,o_proj]"
FEATURES = {
    "agents": f"{AGENTS} agents.order=waves",
    "agents by arrival": f"{AGENTS} agents.order=arrival rollout.deterministic=false",
    "new rows": f"{AGENTS} agents.order=waves agents.on_rewrite=new_row",
    "carry-over": f"rollout.carry_over=true rollout.oversample=1.5 {CORRECT}",
    "carry-over, any order": f"rollout.carry_over=true rollout.deterministic=false {CORRECT}",
    "roles, lag 0": f"{ROLES} roles.lag=0",
    "roles": f"{ROLES} roles.lag=1",
    "roles, turn": f"{IN_FLIGHT} roles.granularity=turn",
    "roles, group": f"{IN_FLIGHT} roles.granularity=group",
    "roles, sample": f"{IN_FLIGHT} roles.granularity=sample rollout.deterministic=false",
    "dynamic sampling": "algorithm=dapo dynamic_sampling.prompts_per_round=8",
    "critic": "algorithm=ppo",
    "rloo": "algorithm=rloo",
    "remax": "algorithm=remax",
    "implicit reward": "algorithm=prime",
    "reinforce++": "algorithm=reinforce_pp",
    "spin": f"algorithm=spin {UNSCORED}",
    "distillation": f"algorithm=distill teacher.path=DIR/model {UNSCORED}",
    "teacher": "teacher.path=DIR/model teacher.advantage_coef=0.5",
    "own teacher": "teacher.self_taught=initial teacher.advantage_coef=0.5 teacher.max_prompt_tokens=200",
    "reference": "objective.kl_coef=0.05",
    "KL in the reward": "objective.reward_kl.coef=0.05",
    "GSPO": "objective.loss=gspo objective.aggregation=seq-mean-token-mean",
    "entropy": "objective.entropy_coef=0.01",
    "reward model": "reward.model.path=DIR/classifier",
    "judge": (
        "reward.judge.path=DIR/judge reward.judge.parser=DIR/parse.py:parse "
        "reward.judge.max_prompt_tokens=256 reward.judge.max_response_tokens=8"
    ),
    "overlong penalty": "reward.overlong_buffer_tokens=3",
    "replay of the old policy's experts": f"{EXPERTS} training.router_replay=old_policy",
    "replay of the engine's experts": f"{EXPERTS} training.router_replay=engine",
    "experts over ranks": f"{EXPERTS} training.ep=2",
    "sampling masks": "rollout.top_p=0.9",
    "drafts": "rollout.draft.path=DIR/model rollout.draft.tokens=2",
    "drafts of the head": "model.path=DIR/head rollout.draft.method=mtp training.mtp.head_lr=0.001",
    "bitwise numerics": "model.numerics=bitwise",
    "bfloat16": "model.dtype=bfloat16",
    "FP8 in the engine": "model.path=DIR/blocks model.dtype=bfloat16 rollout.quantization=fp8",
    "LoRA": f"{LORA} adapter.in_engine=merged",
    "LoRA beside the weights": BESIDE,
    "DoRA": "adapter.kind=dora adapter.rank=4",
    "PiSSA": f"{LORA} adapter.init=pissa",
    "FP8 base": f"model.path=DIR/blocks {LORA} adapter.base=fp8",
    "sweep": f'sweep.adapters=[{{"run.seed":1}},{{"run.seed":2}}] {BESIDE}',
    "tp 2": "training.tp=2",
    "pp 2": "training.pp=2",
    "cp 2": "training.cp=2",
    "engine of two ranks": "rollout.tp=2",
    "whole experts in the engine": f"{EXPERTS} rollout.tp=2 rollout.ep=2",
    "longest first": "rollout.longest_first=true",
    "validation": "data.val=[DIR/test.parquet] validation.every=2 validation.max_prompts=4",
    "background checkpoints": "checkpoint.background=true checkpoint.every=1",
    "stored rollouts": "logging.rollouts=all",
    "traces": "trace.steps=[2]",
    "rejection": "rollout_correction.reject=token-k1 rollout_correction.reject_high=2.0",
}
"""Feature -> the keys that enable it, for example traces; DIR is the directory of `save_inputs`."""
MAKE_MODELS = """
import sys
from pathlib import Path
from tests.checkpoints import save_qwen2, save_qwen2_classifier
from tests.toy import save_toy
from tools.tiny_models import save_tiny

directory = Path(sys.argv[1])
save_toy(directory)
save_tiny("Qwen3MoeForCausalLM", directory / "experts", seed=0)
save_tiny("Glm4MoeForCausalLM", directory / "head", seed=0, num_nextn_predict_layers=1)
blocks = dict(hidden_size=256, intermediate_size=256, num_key_value_heads=4)
save_qwen2(directory / "blocks", seed=5, **blocks)
save_qwen2(directory / "judge", seed=4, max_position_embeddings=512)
save_qwen2_classifier(directory / "classifier", seed=3)
"""


def keys_of(names: Sequence[str], ranks: int = RANKS) -> list[str] | None:
    """Return the keys of features together; None if two features need different values of a key."""
    keys: dict[str, str] = {}
    half = ranks // 2
    roles = f"roles.train=0-{half - 1} roles.rollout={half}-{ranks - 1}"
    for name in names:
        for item in FEATURES[name].replace(TWO_ROLES, roles).split():
            key, _, value = item.partition("=")
            if keys.setdefault(key, value) != value:
                return None
    return [f"{key}={value}" for key, value in keys.items()]


def refusal(names: Sequence[str], ranks: int = RANKS) -> str | None:
    """Return why a combination cannot run: a sentence, ALTERNATIVES or MORE_RANKS; None if it can."""
    keys = keys_of(names, ranks)
    if keys is None:
        return ALTERNATIVES
    try:
        config = load_config(None, [*DATA, *keys])
        check(config, load_points(None, [*DATA, *keys]) if config.sweep.is_on else [])
        train_ranks, rollout_ranks = map(len, role_ranks(config, ranks))
    except ConfigError as error:
        return str(error)
    grid = config.training
    fits = train_ranks % (grid.tp * grid.pp * grid.cp * grid.ep) == 0 == rollout_ranks % config.rollout.tp
    return None if fits else MORE_RANKS


def draw(
    number: int, size: int, rng: random.Random, only: Sequence[str] = (), ranks: int = RANKS
) -> list[tuple[str, ...]]:
    """Return combinations of that size that are accepted, at most `number`, each with the features `only`."""
    rest = [name for name in FEATURES if name not in only]
    every = list(itertools.combinations(rest, size - len(only)))
    rng.shuffle(every)
    accepted = ((*only, *others) for others in every if refusal((*only, *others), ranks) is None)
    return list(itertools.islice(accepted, number))


def save_inputs(directory: Path) -> None:
    """Write models, data and functions that the features name."""
    from tests.spawn import run_ranks

    run_ranks(1, MAKE_MODELS, directory, timeout=300)
    (directory / "parse.py").write_text("def parse(text):\n    return float(len(text) % 3)\n")


def run(
    names: Sequence[str],
    inputs: Path,
    directory: Path,
    *,
    resumes: bool,
    ranks: int = RANKS,
    program: Path = TRAIN,
) -> str:
    """Run a combination; return what is wrong with it, "" if nothing is. program: see `tests.toy.train`."""
    keys = [key.replace("DIR", str(inputs)) for key in keys_of(names, ranks) or []]
    whole, resumed = directory / "run", directory / "resumed"
    config = write_config(directory, inputs, f"run.max_steps={STEPS}", *SAVES * resumes, *keys)
    try:
        train(ranks, config, run=whole, timeout=240, program=program)
        if resumes:
            shutil.copytree(whole, resumed)
            for last in resumed.rglob(f"step_{STEPS:06d}"):
                shutil.rmtree(last)
            train(ranks, config, run=resumed, timeout=240, program=program)
        points = sorted(path.parent.relative_to(whole) for path in whole.rglob("metrics.jsonl"))
        for run_dir in [start / point for start in (whole, resumed)[: 1 + resumes] for point in points]:
            found = records(run_dir)
            if not found or found[-1]["training/global_step"] != STEPS:
                return f"{len(found)} records"
            for step in found:
                if wrong := [name for name, value in step.items() if not _is_finite(value)]:
                    return f"not finite: {', '.join(wrong)}"
        if resumes and load_config(str(config), []).rollout.deterministic:
            for point in points:
                for own, again in zip(comparable(whole / point), comparable(resumed / point), strict=True):
                    if wrong := sorted(k for k in own.keys() | again.keys() if own.get(k) != again.get(k)):
                        step = own["training/global_step"]
                        return f"step {step} of the resumed run has other values of {', '.join(wrong[:5])}"
    except RanksFailed as error:
        lines = [line for text in error.stderr for line in text.splitlines()]
        said = [line for line in lines if line.startswith("error")]
        return (said or lines or [str(error)])[-1]
    except AssertionError as error:
        return str(error)
    return ""


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def count_pairs() -> dict[str, int]:
    """Return the number of pairs that are accepted, and refused."""
    refusals = [refusal(pair) for pair in itertools.combinations(FEATURES, 2)]
    others = {text: refusals.count(text) for text in (ALTERNATIVES, MORE_RANKS)}
    accepted = refusals.count(None)
    return {"accepted": accepted, "refused": len(refusals) - accepted - sum(others.values())} | others


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="one combination of features")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--triples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=[], nargs="+", help="features of every combination")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--on-cuda", action="store_true", help="with CUDA's defaults and branches")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    if unknown := {*args.names, *args.only} - {*FEATURES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FEATURES)}")
    if args.list:
        print(", ".join(f"{name}: {number}" for name, number in count_pairs().items()))
        for pair in itertools.combinations(FEATURES, 2):
            print(f"{' + '.join(pair)}: {refusal(pair) or 'accepted'}")
        return 0
    rng = random.Random(args.seed)
    drawn = [tuple(args.names)] if args.names else []
    if not args.names:
        drawn = [
            names
            for number, size in ((args.pairs, 2), (args.triples, 3))
            for names in draw(number, size, rng, args.only, args.ranks)
        ]
    failed = []
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        inputs = Path(name, "inputs")
        save_inputs(inputs)
        for number, names in enumerate(drawn):
            directory = Path(name, str(number))
            directory.mkdir()
            started = time.monotonic()
            problem = run(
                names,
                inputs,
                directory,
                resumes=bool(args.names) or rng.random() < RESUMED,
                ranks=args.ranks,
                program=ON_CUDA if args.on_cuda else TRAIN,
            )
            is_refused = args.on_cuda and FOR_CPU in problem
            failed += [names] * (bool(problem) and not is_refused)
            verdict = ("refused: " if is_refused else "FAILED: ") + problem if problem else "ok"
            print(f"{' + '.join(names)}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(drawn) - len(failed)} of {len(drawn)} combinations ran")
    for names in failed:
        print(f"failed: {' '.join(map(repr, names))}\n    {' '.join(keys_of(names) or [])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
