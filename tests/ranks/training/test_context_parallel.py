"""Gradients and log-probs of context parallel ranks equal the results of ranks that hold whole rows.

Faults of other programs that this shows: labels shifted after a row was divided, so that the last token of a
chunk has the first of another as its label (verl #4250); gradients scaled by a number of ranks that omits cp
or contains it twice (verl #4250, SkyRL #1420, #1751). test_gradients.py shows metrics summed over the
ranks of a group although each rank has the whole (SkyRL #1420); tests/ranks/dry_run/test_context.py counts
received bytes, and would show gathered logits (SkyRL #1751). Images, which a rank would divide before they
are merged (slime #1379), are refused: tests/unit/config/test_exclusions.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rl.config.objective import LOSSES
from rl.models import SUPPORTED, VISION
from tests.checkpoints import PARTICULAR, save_qwen2, save_qwen2_classifier, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "cp_worker.py"
DENSE = {"cp1": "1x1x1x1", "cp2": "1x1x1x2", "cp4": "1x1x1x4", "pp2_cp2": "1x2x1x2", "tp2_cp2": "2x1x1x2"}
"""TP x PP x EP x CP on four ranks."""
EXPERTS = DENSE | {"tp2_cp2": "2x1x2x2", "ep2_cp2": "1x1x2x2"}
ON_EIGHT = "tp2_pp2_ep2_cp2=2x2x2x2:ppo"
LIMIT = 1e-6
"""Largest difference in float32, relative to the norm of the whole gradient or to the largest log-prob."""
INIT = dict(initializer_range=0.02)
"""As published configs have it. Larger weights enlarge the rounding of the logits."""
GEMMA = dict(initializer_range=0.002)
"""Its embeddings are multiplied by the root of the hidden size, 11."""


def assert_same(directory: Path) -> None:
    """Compare with cp 1 and whole prompts, for each loss."""
    found = {path.stem: torch.load(path) for path in directory.glob("*.pt")}
    errors = {}
    for layout, results in found.items():
        for (loss, share), result in results.items():
            expected = found["cp1"][loss, False]
            norm = norm_of(expected["gradient"])
            assert norm > 1e-3, loss
            change = {n: result["gradient"][n].double() - x.double() for n, x in expected["gradient"].items()}
            largest = expected["outputs"].abs().max()
            difference = float((result["outputs"] - expected["outputs"]).abs().max() / largest)
            errors[f"{layout} {loss}{' shared' * share}"] = norm_of(change) / norm, difference
    print({where: [f"{error:.1e}" for error in both] for where, both in errors.items()})
    assert max(map(max, errors.values())) <= LIMIT, errors


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([x.double().norm() for x in tensors.values()]).norm())


def test_every_architecture_is_tested():
    assert set(PARTICULAR) == set(SUPPORTED) - set(VISION)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", PARTICULAR)
def test_gradients_are_those_of_whole_rows(tmp_path, architecture):
    init = GEMMA if "Gemma" in architecture else INIT
    checkpoint = save_tiny(architecture, tmp_path / "model", seed=3, **init)
    with safe_open(f"{checkpoint}/model.safetensors", "pt") as file:
        has_experts = any(".experts." in name for name in file.keys())
    layouts = EXPERTS if has_experts else DENSE
    run_ranks(4, WORKER, checkpoint, tmp_path, *(f"{k}={v}:ppo" for k, v in layouts.items()), timeout=560)
    if has_experts:
        run_ranks(8, WORKER, checkpoint, tmp_path, ON_EIGHT, timeout=560)
    assert_same(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["losses", "critic"])
def test_gradients_of_every_loss(tmp_path, kind):
    if kind == "critic":
        checkpoint, losses = save_qwen2_classifier(tmp_path / "model", seed=8, **INIT), "values"
    else:
        checkpoint = save_qwen2(tmp_path / "model", seed=2, **INIT)
        losses = ",".join([*LOSSES, "pairs", "labels"])
    cases = [f"{name}={DENSE[name]}:{losses}" for name in ("cp1", "cp2", "cp4")]
    run_ranks(4, WORKER, checkpoint, tmp_path, *cases, timeout=560)
    assert_same(tmp_path)
