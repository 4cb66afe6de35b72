"""A rehearsal of the CUDA path without a GPU: runs on the stand-in of tests/rehearsal execute every statement
of the program that depends on CUDA."""

import json
import re

import pytest

from tests.checkpoints import save_tiny
from tests.records import records
from tests.rehearsal.statements import ELSEWHERE, cuda_statements
from tests.spawn import ROOT, run_ranks
from tests.toy import SFT, write_config

GAME = ROOT / "tests" / "runs" / "agent_game.py"
PAGE = ROOT / "docs" / "gpu.md"
REHEARSE = ROOT / "tests" / "rehearsal" / "rehearse.py"
HINT = """
Each of these statements runs only on CUDA, and no test has executed it. Make one of the runs below reach it
(a config key in RUN), or, if torch or vLLM needs a GPU there, extend tests/rehearsal/cuda_stand_in.py.
"""
RUN = (
    "model.dtype=bfloat16",
    "objective.kl_coef=0.01",
    "training.head_chunk_tokens=16",
    "rollout.top_p=0.95",
    "checkpoint.every=1",
    "checkpoint.background=true",
    "trace.steps=[1]",
    "trace.torch_profiler=[refit]",
    "trace.memory_snapshot=true",
    "trace.nvtx=true",
    "training.optimizer.host_share=0.5",
)


@pytest.fixture(scope="module")
def rehearsed(toy, tmp_path_factory):
    """Return the statements that were reached, and the run directory of two steps and a resumed third."""
    directory = tmp_path_factory.mktemp("rehearsal")
    config = write_config(directory, toy, *RUN)
    runs = (
        ("run.max_steps=2",),
        ("run.max_steps=3",),
        (
            *SFT,
            "rollout.top_p=1",
            "model.dtype=float32",
            "objective.kl_coef=0",
            "run.max_steps=1",
            "run.mode=check",
            f"run.dir={directory}/float32",
        ),
    )
    lines = directory / "lines"
    for overrides in runs:
        run_ranks(1, REHEARSE, lines, "--config", config, *overrides, timeout=300)
    old = (
        "run.max_steps=2",
        "rollout_correction.truncate_tokens=2",
        "rollout.top_p=1",
        f"run.dir={directory}/old",
    )
    carried = (
        "rollout.carry_over=true",
        "rollout.max_response_tokens=24",
        f"rollout.stop_token_ids={list(range(10, 22))}",  # some samples end early, others are carried
        "rollout.max_concurrent_samples=8",
    )
    beside = ("adapter.kind=lora", "adapter.in_engine=adapter")
    run_ranks(1, REHEARSE, lines, "--config", config, *old, *carried, *beside, timeout=300)
    points = ("sweep.adapters=[{run.seed: 1}, {run.seed: 2}]", "checkpoint.background=false")
    untraced = (
        "trace.steps=[]",
        "trace.torch_profiler=[]",
        "trace.memory_snapshot=false",
        "trace.nvtx=false",
    )
    joint = (*beside, *points, *untraced, "run.max_steps=2", f"run.dir={directory}/joint")
    run_ranks(1, REHEARSE, lines, "--config", config, *joint, timeout=300)
    roles = (*old, f"run.dir={directory}/roles", "roles.train=0-0", "roles.rollout=1-1", "roles.lag=1")
    run_ranks(2, REHEARSE, lines, "--config", config, *roles, timeout=300)
    whole = ("rollout.top_p=1", "rollout.top_k=0", "rollout.min_p=0")
    exact = ("model.numerics=bitwise", *whole, "run.max_steps=1", f"run.dir={directory}/bitwise")
    run_ranks(1, REHEARSE, lines, "--config", config, *exact, timeout=300)
    assert records(directory / "bitwise")[0]["training/rollout_probs_diff_max"] == 0.0
    game = (f"agents.environment={GAME}:Long", "agents.workers=1", "rollout.kv_offload_gib=0.1", *untraced)
    turns = ("data.max_prompt_tokens=300", "rollout.max_response_tokens=40", "agents.max_tokens_per_turn=6")
    offloading = (*game, *turns, *whole, "run.max_steps=1", f"run.dir={directory}/offloading")
    run_ranks(1, REHEARSE, lines, "--config", config, *offloading, timeout=300)
    # Drafts end within the second generation, because the policy has learned and the draft model has not.
    drafting = (f"rollout.draft={{path: {toy}/model, tokens: 2, min_tokens_per_step: 3}}",)
    many = ("rollout.samples_per_prompt=64", "run.max_steps=2", f"run.dir={directory}/drafts")
    run_ranks(1, REHEARSE, lines, "--config", config, *drafting, *untraced, *whole, *many, timeout=300)
    drafts_on = [record["perf/drafts_on"] for record in records(directory / "drafts")]
    assert drafts_on == [1.0, 0.0]
    nets = save_tiny("Qwen3NextForCausalLM", directory / "nets", seed=1)
    recurrent = (f"model.path={nets}", *untraced, *whole, "run.max_steps=1", f"run.dir={directory}/recurrent")
    run_ranks(1, REHEARSE, lines, "--config", config, *recurrent, timeout=300)
    reached = {tuple(found) for path in lines.iterdir() for found in json.loads(path.read_text())}
    return reached, directory / "run"


def test_every_cuda_statement_is_executed(rehearsed):
    reached, _ = rehearsed
    statements = cuda_statements()
    assert len(statements) > 25  # the search finds them
    missing = [each for each in statements if (each.file, each.line) not in reached]
    print(f"{len(statements)} statements that depend on CUDA, {len(statements) - len(missing)} executed")
    assert not missing, "\n".join(map(str, missing)) + HINT


def test_the_page_says_of_every_file_what_needs_a_gpu():
    branches = re.compile(r'\.type == "cpu"|is_cpu\(\)')
    paths = [path for path in (ROOT / "rl").rglob("*.py") if branches.search(path.read_text())]
    files = {each.file for each in cuda_statements()} | {str(path.relative_to(ROOT)) for path in paths}
    listed = PAGE.read_text().partition("The files of `rl/` whose code depends on the device")[2]
    named = {f"rl/{name}" for name in re.findall(r"`([a-z_/0-9]+\.py)`", listed)}
    assert named == {file for file in files if not file.startswith(ELSEWHERE)}


@pytest.mark.slow  # a new interpreter, because Megatron looks for Transformer Engine at import
@pytest.mark.parametrize("family", ["", "Qwen3_5ForCausalLM"])
def test_layers_of_transformer_engine_train_and_refit(toy, tmp_path, family):
    other = [f"model.path={save_tiny(family, tmp_path / 'tiny', seed=1)}"] if family else []
    config = write_config(tmp_path, toy, *RUN, "run.max_steps=2", *other)
    run_ranks(1, REHEARSE, "--te", tmp_path / "lines", "--config", config, fresh=True, timeout=300)
    found = records(tmp_path / "run")
    assert len(found) == 2 and all(record["actor/grad_norm"] > 0 for record in found)
    # The engine holds the weights of these layers under other names and in other shapes.
    assert all(record["training/rollout_probs_diff_mean"] < 0.01 for record in found)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["model", "fp8"])
def test_adapters_learn_on_transformer_engine_as_without_it(toy, tmp_path, base):
    adapter = f"adapter={{kind: lora, rank: 4, base: {base}}}"
    sft = (*SFT, "rollout.top_p=1.0")
    config = write_config(tmp_path, toy, *RUN, *sft, adapter, "objective.kl_coef=0", "run.max_steps=3")
    losses = []
    for name, options in (("with", ["--te"]), ("without", [])):
        run_dir = f"run.dir={tmp_path}/{name}"
        run_ranks(
            1, REHEARSE, *options, tmp_path / "lines", "--config", config, run_dir, fresh=True, timeout=300
        )
        losses.append([record["sft/loss"] for record in records(tmp_path / name)])
    assert len(losses[0]) == 3 and losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # bfloat16


def test_points_of_a_sweep_share_the_engine(rehearsed):
    for name in ("seed=1", "seed=2"):
        found = records(rehearsed[1].parent / "joint" / name)
        assert len(found) == 2 and all(record["actor/grad_norm"] > 0 for record in found)
        assert all(record["training/rollout_probs_diff_mean"] < 0.01 for record in found)


def test_an_engine_with_adapters_gets_the_base_again_after_a_sleep(rehearsed):
    found = records(rehearsed[1].parent / "old")
    assert len(found) == 2 and all(record["training/rollout_probs_diff_mean"] < 0.01 for record in found)
    first, second = (record["perf/refit_bytes_local"] for record in found)
    assert first == second > 0


def test_the_rehearsal_trains(rehearsed):
    # Weights are NaN after a sleep, so finite log-probs were refitted; the engine's equal the trainer's.
    found = records(rehearsed[1])
    assert [record["training/global_step"] for record in found] == [1, 2, 3]
    assert all(record["actor/grad_norm"] > 0 for record in found)
    names = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
    assert all(record[name] == 1.0 for record in found for name in names)
    assert all(record["perf/mfu/actor"] > 0 for record in found)
    # With rollout.top_p the engine's log-probs are over the tokens that it kept.
    assert all(record["training/rollout_probs_diff_mean"] < 0.01 for record in found)
