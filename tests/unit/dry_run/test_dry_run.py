"""The dry run from the command line, and what its numbers must obey. Arithmetic only."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.dry_run.changes import cheapest_change, with_values
from rl.dry_run.command import main
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.memory import layer_elements, layout_of
from rl.dry_run.parameters import buffer_elements, count_engine, count_parameters, group_parts
from rl.dry_run.report import verdict
from rl.models import architecture

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
PUBLISHED = {  # billions, as the model cards say; DeepSeek-V3 without its layer for multi-token prediction
    "deepseek-v3": 671.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "mixtral-8x7b": 46.70,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-32b": 32.76,
    "qwen2.5-7b": 7.616,
    "qwen3-30b-a3b": 30.53,
    "qwen3-8b": 8.19,
}
PRODUCTION = {
    path: int(nodes or 1) * int(gpus)
    for path in CONFIGS.glob("*.yaml")
    for nodes, gpus in re.findall(r"_(?:(\d+)x)?(\d+)(?:gpu)?$", path.stem)
}
PRODUCTION |= {CONFIGS / "ppo_deepseek671b.yaml": 512}
"""Config -> ranks, which its name says."""


def parts_of(model):
    hf = json.loads((CONFIGS / "models" / model / "config.json").read_text())
    return group_parts(architecture(hf).weights(hf))


def found(name, world_size, *overrides, plan=False, **machine):
    config = load_config(str(CONFIGS / f"{name}.yaml"), overrides)
    return estimate(config, world_size, Hardware(**machine), plan=plan)


def qwen(*overrides, **machine):
    return found("qwen2.5-7b_gsm8k_grpo_8gpu", 8, *overrides, **machine)


@pytest.mark.parametrize("model", sorted(path.name for path in (CONFIGS / "models").iterdir()))
def test_parameters_are_the_published_ones(model):
    billions = count_parameters(parts_of(model)) / 1e9
    assert billions == pytest.approx(PUBLISHED[model], rel=1e-3)


@pytest.mark.parametrize(
    "model, tp", [("qwen2.5-7b", 4), ("qwen3-30b-a3b", 8), ("mixtral-8x7b", 2), ("deepseek-v3", 32)]
)
def test_an_engine_holds_its_share_and_what_every_rank_repeats(model, tp):
    parts = parts_of(model)
    whole, (held, in_float32) = count_parameters(parts), count_engine(parts, tp)
    repeated = sum(part.elements for part in parts if not part.weight.cut.split)
    assert whole / tp <= held + in_float32 <= (whole - repeated) / tp * 1.02 + repeated


def test_a_bucket_is_padded_as_megatron_pads_it():
    # The three of 65 start at 0, 128 and 256; the last is the multiple of 128 that 3 divides.
    cases = ([], 4, 0), ([64], 1, 128), ([1, 1], 1, 128), ([65, 65, 65], 1, 384), ([100], 3, 384)
    for sizes, ranks, expected in cases:
        assert buffer_elements(sizes, ranks) == expected


@pytest.mark.parametrize("path", sorted(PRODUCTION), ids=lambda path: path.stem)
def test_every_production_config_fits_into_gpus_of_80_gib(path):
    assert estimate(load_config(str(path)), PRODUCTION[path], Hardware(), plan=False).problems == []


class TestMemory:
    def test_nothing_of_the_trainer_stays_in_generation_if_all_is_offloaded(self):
        some, none, half = (qwen(f"training.offload={what}").memory for what in ("all", "none", "optimizer"))
        state = none.stages[0].states["policy"]
        assert none.peak("generation")[0] - some.peak("generation")[0] == state.total
        assert half.peak("generation")[0] - some.peak("generation")[0] == state.weights
        assert none.peak("training") == some.peak("training")
        assert (none.away, half.away, some.away) == (0, state.optimizer, state.optimizer + state.weights)

    def test_a_critic_doubles_the_state(self):
        grpo = qwen().memory.stages[0]
        ppo = qwen("algorithm=ppo").memory.stages[0]
        head = 152064 * 3584 / 2 - 3584  # a value head in the place of the vocabulary's rows
        assert grpo.states["policy"].total == ppo.states["policy"].total
        weights = grpo.states["policy"].weights
        assert ppo.states["critic"].weights == pytest.approx(weights - 2 * head, rel=1e-5)

    def test_recompute_keeps_the_input_of_each_layer_alone(self):
        kept = qwen().memory.stages[0].activations
        assert qwen("training.recompute=false").memory.stages[0].activations > 5 * kept

    def test_earlier_stages_keep_more_micro_batches(self):
        stages = found("ppo_deepseek671b", 512).memory.stages
        inputs = 4 * 7168 * 10240 / 8 * 2  # layers, hidden, tokens of the longest row on a rank, bytes
        for stage in range(1, 13):
            assert stages[stage].activations - stages[stage + 1].activations == pytest.approx(inputs)

    def test_only_the_last_stage_has_a_head(self):
        first, last = found("qwen2.5-32b_dapo_aime_16x8", 128).memory.stages
        assert first.head == 0 < last.head

    def test_the_cache_takes_what_the_share_leaves(self):
        engine = qwen("rollout.gpu_memory_utilization=0.5").memory.engine
        assert engine.cache == engine.budget - engine.weights - engine.workspace and engine.budget == 40 * GIB
        # layers, keys and values, heads of a rank, channels, bytes
        assert engine.bytes_per_token == 28 * 2 * 2 * 128 * 2
        assert engine.cache_tokens == engine.cache // engine.bytes_per_token

    def test_latent_attention_repeats_its_cache_and_one_projection(self):
        some = found("ppo_deepseek671b", 512)
        engine, model = some.memory.engine, some.models["policy"]
        elements, in_float32 = count_engine(model.parts, 32)
        assert engine.bytes_per_token == 61 * (512 + 64) * 2
        assert engine.weights == 2 * (elements + 61 * 128 // 32 * (128 + 128) * 512) + 4 * in_float32

    def test_a_share_too_small_for_one_sequence_is_a_problem(self):
        (problem,) = qwen("rollout.gpu_memory_utilization=0.1").problems
        assert "KV cache" in problem and "1536" in problem

    def test_layers_keep_what_the_formula_says(self):
        # arXiv:2205.05198, for a layer without dropout and with flash attention.
        some = qwen("training.tp=1", "rollout.tp=1")
        layout, model = layout_of(some.config, 8), some.models["policy"]
        hidden, ffn, query, pairs = 3584, 18944, 3584, 2 * 512
        products = (hidden + query + pairs) + (query + hidden) + (hidden + 2 * ffn) + (ffn + hidden)
        assert layer_elements(model, 0, layout, 1.0, 1.0) == products + (query + 512) + 2 * hidden
        cut = layer_elements(model, 0, replace(layout, tp=2), 1.0, 1.0)
        assert cut == pytest.approx((products + query + 512 + 2 * hidden) / 2)


class TestChanges:
    def test_the_share_of_the_engine_is_changed_first(self):
        before = qwen("training.offload=none", "rollout.gpu_memory_utilization=0.7")
        change = cheapest_change(before)
        assert list(change.values) == ["rollout.gpu_memory_utilization"] and change.estimate.problems == []
        assert "generation needs" in before.problems[0]
        assert change.words(before) in verdict(before, change)

    def test_recompute_is_found_for_activations_that_do_not_fit(self):
        overrides = "training.recompute=false", "training.micro_batch_tokens=131072"
        before = qwen(*overrides)
        assert "training needs" in before.problems[0]
        change = cheapest_change(before)
        assert change.world_size == 8 and change.estimate.problems == [] and len(change.values) == 1
        changes = [f"{key}={json.dumps(value)}" for key, value in change.values.items()]
        assert qwen(*overrides, *changes).problems == []

    def test_more_ranks_are_the_last_resort(self):
        before = found("ppo_deepseek671b", 256, "training.ep=16")
        assert "training needs" in before.problems[0] and cheapest_change(before).world_size == 512
        before = qwen(gpu_memory_gib=5.0)
        assert cheapest_change(before) is None and "no change" in verdict(before, None)

    def test_a_copy_is_changed(self):
        config = load_config(str(CONFIGS / "quickstart.yaml"))
        assert with_values(config, {"training.tp": 4}).training.tp == 4 and config.training.tp == 1


LARGEST = "--config configs/ppo_deepseek671b.yaml --dry-run --world-size 512".split()
NUMBERS = "policy: gradients;engine: KV cache;refit:;seconds per step;GPU-hours;3,807,910,400".split(";")
DIVIDES = "error: training.tp=2 times training.pp=1 is 2, which does not divide"
COMMANDS = [  # options, exit code, what is printed
    ("--world-size 8", 0, NUMBERS),
    ("--world-size 8 --gpu-memory-gib 24", 2, ["DOES NOT FIT", "cheapest change"]),
    ("--world-size 7", 2, [DIVIDES]),
    ("--world-size 8 model.path=models/unknown", 2, ["--model-shape"]),
    (
        f"--world-size 8 --model-shape {CONFIGS}/models/qwen3-8b model.path=models/unknown",
        0,
        ["8.19 B param"],
    ),
    ("--world-size 8 --tflops -1", 2, ["--tflops is -1"]),
]


class TestCommand:
    @pytest.mark.parametrize("options, code, words", COMMANDS)
    def test_exit_code_and_output(self, options, code, words, capsys):
        config = str(CONFIGS / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml")
        assert main(["--config", config, "--dry-run", *options.split()]) == code
        out, err = capsys.readouterr()
        assert all(word in out + err for word in words), out + err
        if code == 0:
            assert out.rstrip().splitlines()[-1].startswith("FITS")

    @pytest.mark.slow
    def test_the_largest_model_takes_little_of_a_login_node(self):
        core = {min(os.sched_getaffinity(0))}
        options = dict(cwd=ROOT, capture_output=True, text=True)
        options["preexec_fn"] = lambda: os.sched_setaffinity(0, core)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "train_rl.py", *LARGEST], **options)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and "671.03 B parameters" in done.stdout, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
        assert after.ru_maxrss < 8 << 20  # KiB, of the largest child so far

    def test_it_needs_nothing_but_pyyaml_and_numpy(self):
        """`pip install .` on a login node installs these two; whatever else is installed here is hidden."""
        code = """
            import importlib.abc
            import sys
            from pathlib import Path

            here = {path.stem for path in Path().iterdir()} | sys.stdlib_module_names | {"yaml", "numpy"}

            class LoginNode(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    if name.partition(".")[0] not in here:
                        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

            sys.meta_path.insert(0, LoginNode())
            sys.argv = ["train_rl.py", *sys.argv[1:]]
            import train_rl
            assert train_rl.main() == 0
        """
        command = [sys.executable, "-c", textwrap.dedent(code), *LARGEST]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "671.03 B parameters" in done.stdout
        assert done.stdout.rstrip().splitlines()[-1].startswith("FITS")
