"""Runs with adapters: a critic on the policy's base, the files that a run leaves, and starts from them."""

import pytest
from safetensors.numpy import load_file

from tests import bounds
from tests.records import records
from tests.spawn import LOCKSTEP, ROOT, RanksFailed, run_ranks
from tests.toy import TRAIN, train

LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8", "adapter.targets=[q_proj, up_proj]")
SHARED = ("algorithm=ppo", "critic.share_base=true", "critic.optimizer.lr=1e-2")


@pytest.mark.slow
def test_a_run_starts_from_the_adapters_of_another(config, tmp_path):
    export = ("checkpoint.export_hf=true", "checkpoint.every=3")
    steps = train(2, config, *LORA, *SHARED, *export, "run.max_steps=3", "training.tp=2")
    assert all(step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB for step in steps)
    assert (
        steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0 != steps[1]["critic/values/max"]
    )
    assert steps[-1]["critic/vf_loss"] < steps[0]["critic/vf_loss"] and steps[0]["critic/grad_norm"] > 0
    written = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in written.values())

    export_hf = [LOCKSTEP, "export", tmp_path / "run", "--adapter", "--out", tmp_path / "later"]
    run_ranks(1, *export_hf, timeout=120)
    later = load_file(tmp_path / "later" / "adapter_model.safetensors")
    assert all((later[name] == tensor).all() for name, tensor in written.items())

    path = f"adapter.path={tmp_path}/run/adapter"
    still = ("run.max_steps=1", "training.optimizer.lr=0", "checkpoint.export_hf=true", "adapter.base=fp8")
    [step] = train(1, config, *LORA, path, *still, run=tmp_path / "next")
    assert step["training/rollout_probs_diff_max"] <= bounds.TOY_LOGPROB
    again = load_file(tmp_path / "next" / "adapter" / "adapter_model.safetensors")
    assert again.keys() == written.keys()
    assert all((again[name] == tensor).all() for name, tensor in written.items())
    with pytest.raises(RanksFailed, match="has r=4; set adapter.rank=4"):
        train(1, config, *LORA, "adapter.rank=8", path, run=tmp_path / "refused")


@pytest.mark.slow
def test_adapters_of_rank_8_learn_to_add(tmp_path):
    """Follows configs/quickstart_sft.yaml and configs/toy/grpo_lora.yaml, with the paths of this test."""
    run_ranks(1, ROOT / "tools" / "make_toy.py", "--out", tmp_path / "toy", timeout=300)
    model = tmp_path / "toy" / "model"
    for config in ("quickstart_sft", "toy/grpo_lora"):
        run = tmp_path / config.replace("/", "_")
        paths = [f"run.dir={run}", f"model.path={model}", f"data.train=[{tmp_path}/toy/train.parquet]"]
        if config != "quickstart_sft":
            paths.append(f"data.val=[{tmp_path}/toy/test.parquet]")
        run_ranks(2, TRAIN, "--config", ROOT / "configs" / f"{config}.yaml", *paths, timeout=880)
        model = run / "hf"
    name = "val-core/addition/acc/mean@1"
    found = [record[name] for record in records(run) if name in record]
    assert found[0] < 0.65 and found[-1] >= 0.85
