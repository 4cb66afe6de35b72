import numpy as np
import pytest
import torch

from rl.config.schema import Config
from rl.data.batch import Batch
from rl.dry_run.hardware import Hardware
from rl.dry_run.shape import SHAPES, models_of
from rl.phases.batch_metrics import engine_gap
from rl.phases.performance import slowest_rank, time_per_token, utilisation
from rl.runtime.peaks import peak_tflops
from rl.training.micro_batch_plans import Cost

METRICS = {"timing_s/gen": 2.0, "timing_s/update_actor": 4.0, "timing_s/reward": 9.0}


def test_generation_is_per_response_token_and_others_per_token():
    assert time_per_token(METRICS, 600, 400) == {
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 4.0,
    }
    assert time_per_token(METRICS, 0, 0) == {}


def test_utilisation_is_operations_over_the_peak():
    found = utilisation(METRICS, {"update_actor": 3e12, "ref": 1e12}, peak=2 * 1e12)
    assert found == {"perf/mfu/actor": pytest.approx(3 / 8)}


def test_operations_are_those_of_the_dry_run():
    [path, *_] = sorted(SHAPES.glob("qwen2*/config.json"))
    model = models_of(Config(), shape=str(path))[0]["policy"]
    cost = Cost.of_model(model.hf, model.weights)
    assert cost.per_token + cost.per_answer_token == 2 * model.multiplied
    assert cost.per_pair == 2 * model.num_layers * sum(model.heads_width)


def test_peaks_are_found_by_name():
    assert peak_tflops("NVIDIA H100 80GB HBM3") == peak_tflops("NVIDIA H200") == Hardware().tflops
    assert peak_tflops("NVIDIA H20") == 148.0 and peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("a device of tomorrow") is None


def test_the_slowest_rank_is_named_if_there_are_others():
    assert slowest_rank([0.0]) == {}
    assert slowest_rank([0.1, 0.5, 0.0]) == {"perf/slowest_rank": 1, "perf/slowest_rank_late_s": 0.5}


def test_engine_gap_is_that_of_numpy():
    rng = np.random.default_rng(0)
    ours, engines = torch.tensor(rng.uniform(-3, 0, (2, 50)))
    mask = torch.ones(50, dtype=torch.float64)
    mask[::7] = 0
    ids = [np.arange(50, dtype=np.int32)]
    batch = Batch(
        [ids[0][:3]], ids, torch.tensor([0]), torch.tensor([False]), mask=mask, rollout_logprobs=engines
    )
    found = engine_gap(batch, ours)
    counted = mask.numpy() > 0
    p, q = np.exp(ours.numpy())[counted], np.exp(engines.numpy())[counted]
    assert found == {
        "training/rollout_probs_diff_mean": pytest.approx(np.abs(p - q).mean()),
        "training/rollout_probs_diff_max": pytest.approx(np.abs(p - q).max()),
        "training/rollout_probs_diff_std": pytest.approx(np.abs(p - q).std()),
        "training/rollout_actor_probs_pearson_corr": pytest.approx(np.corrcoef(p, q)[0, 1]),
    }
    assert "training/rollout_actor_probs_pearson_corr" not in engine_gap(batch, torch.zeros_like(ours))
