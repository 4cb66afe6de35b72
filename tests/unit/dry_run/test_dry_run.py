"""The dry run's command, and properties of its numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.dry_run.activations import layer_elements
from rl.dry_run.changes import cheapest_change, single_changes, with_values
from rl.dry_run.command import main
from rl.dry_run.estimate import estimate
from rl.dry_run.grids import layout_of
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.host import memory_warning
from rl.dry_run.parameters import buffer_elements, count_engine, count_parameters, group_parts
from rl.dry_run.report import verdict
from rl.models import architecture
from rl.models.placement import RolloutPlacement
from rl.runtime.ranks import Ranks
from tools.dev.bench_tables.measured import COMMON, OF_MODEL
from tools.plan import main as plan

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
ON_TWO_CORES = ("quickstart", "quickstart_sft", "gsm8k_toy", "smollm2-135m_arithmetic_grpo_2cpu")


def ranks_of(path: Path) -> int:
    """Return the number of ranks of a production config, the last part of its name."""
    found = re.search(r"_(?:(\d+)x)?(\d+)(?:gpu)?$", path.stem.replace("ppo_deepseek671b", "ppo_64x8"))
    return int(found[1] or 1) * int(found[2])


PRODUCTION = {path: ranks_of(path) for path in CONFIGS.glob("*.yaml") if path.stem not in ON_TWO_CORES}
V3 = "deepseek-v3_math_grpo_64x8"
GRPO = "qwen2.5-7b_gsm8k_grpo_8gpu"
LORA = ("adapter.kind=lora", "adapter.rank=16", "training.tp=1", "rollout.tp=2")


def parts_of(model):
    hf = json.loads((CONFIGS / "models" / model / "config.json").read_text())
    return group_parts(architecture(hf).weights(hf))


def found(name, world_size, *overrides, plan=False, **machine):
    return estimate(
        load_config(str(CONFIGS / f"{name}.yaml"), overrides), world_size, Hardware(**machine), plan=plan
    )


@pytest.mark.parametrize(
    "model, tp", [("qwen2.5-7b", 4), ("qwen3-30b-a3b", 8), ("mixtral-8x7b", 2), ("deepseek-v3", 32)]
)
def test_an_engine_holds_its_share_and_replicated_weights(model, tp):
    parts = parts_of(model)
    whole, (held, in_float32) = count_parameters(parts), count_engine(parts, RolloutPlacement(tp, tp, 99))
    repeated = sum(part.elements for part in parts if not part.weight.cut.split)
    assert whole / tp <= held + in_float32 <= (whole - repeated) / tp * 1.02 + repeated


def test_an_evaluation_needs_less_than_its_training():
    (evaluation,), (training,) = (
        found(GRPO, 8, f"run.mode={mode}").memory.stages for mode in ("evaluate", "train")
    )
    assert evaluation.state < training.state and evaluation.activations == 0.0 < training.activations


def test_a_bucket_is_padded_as_megatron_pads_it():
    assert buffer_elements([], 4) == 0
    assert buffer_elements([64], 1) == 128
    assert buffer_elements([1, 1], 1) == 128
    assert buffer_elements([65, 65, 65], 1) == 384  # starts at 0, 128 and 256
    assert buffer_elements([100], 3) == 384  # multiples of 128 that 3 divides


@pytest.mark.parametrize("path", sorted(PRODUCTION), ids=lambda path: path.stem)
def test_every_production_config_fits_80_gib(path):
    assert estimate(load_config(str(path)), PRODUCTION[path], Hardware(), plan=False).problems == []


SMOLLM2 = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)
TOY = SMOLLM2 | dict(vocab_size=102, hidden_size=128, intermediate_size=256, num_hidden_layers=4)


WIDE = "rollout.max_response_tokens=206"
"""With it the samples of a prompt fill a micro-batch that would otherwise be smaller on a CPU."""


class TestHost:
    def config(self, tmp_path, hf, *overrides):
        (tmp_path / "config.json").write_text(json.dumps(hf))
        return load_config(str(CONFIGS / "quickstart.yaml"), (f"model.path={tmp_path}", *overrides))

    @pytest.mark.parametrize(
        "tokens, measured, overrides",
        [  # VmHWM after two steps on 2026-11-29, in GiB
            (520, 5.21, ()),
            (832, 6.05, ()),
            (832, 4.97, ("model.dtype=bfloat16",)),
            (1248, 4.34, ("training.recompute=full", WIDE)),
            (1664, 8.39, (WIDE,)),
        ],
    )
    def test_a_rank_has_the_measured_peak(self, tmp_path, tokens, measured, overrides):
        keys = (f"training.micro_batch_tokens={tokens}", "rollout.max_concurrent_samples=256", *overrides)
        config = self.config(tmp_path, SMOLLM2, "rollout.cpu_kv_cache_mib=256", *keys)
        memory = estimate(config, 1, Hardware(host_memory_gib=23.0, ranks_per_node=1), plan=False).memory
        peak = max(memory.peak(phase)[0] for phase in ("training", "refit", "generation")) / GIB
        assert peak == pytest.approx(measured, rel=0.1)

    @pytest.mark.parametrize(
        "measured, overrides", [(4.43, ()), (3.84, ("training.pp=2",)), (4.37, ("training.cp=2",))]
    )
    def test_the_first_micro_batches_find_no_freed_memory(self, tmp_path, measured, overrides):
        """Measured on 2026-11-30 (docs/real_model.md)."""
        config = self.config(tmp_path, SMOLLM2, *COMMON, *OF_MODEL, *overrides)
        memory = estimate(config, 2, Hardware(host_memory_gib=23.0, ranks_per_node=2), plan=False).memory
        assert memory.peak("training")[0] / GIB == pytest.approx(measured, rel=0.1)

    @pytest.mark.parametrize(
        "ranks, measured, overrides",
        [
            (1, 1.44, ()),
            (2, 1.29, ()),
            (2, 1.25, ("training.backend=transformers",)),
            (2, 1.36, ("training.backend=transformers", "training.shard=2")),
            (1, 1.95, ("rollout.cpu_kv_cache_mib=1024",)),  # at the start, which fills the whole cache
        ],
    )
    def test_a_small_model_has_the_measured_peak(self, tmp_path, ranks, measured, overrides):
        """The largest VmHWM in three steps on 2026-11-30, in GiB: neither the whole cache nor all of
        refit.buffer_mib is in it."""
        sizes = {"hidden_size": 512, "num_hidden_layers": 9, "intermediate_size": 1024, "vocab_size": 102}
        hf = SMOLLM2 | sizes | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        keys = (*COMMON, *OF_MODEL, "rollout.cpu_kv_cache_mib=256", "validation.every=0", *overrides)
        config = self.config(tmp_path, hf, *keys)
        machine = Hardware(host_memory_gib=23.0, ranks_per_node=ranks)
        memory = estimate(config, ranks, machine, plan=False).memory
        peak = max(memory.peak(phase)[0] for phase in ("training", "refit", "generation")) / GIB
        assert peak == pytest.approx(measured, rel=0.1)

    def test_only_responses_have_logits(self, tmp_path):
        """Measured on 2026-11-30, with a vocabulary that takes most of the memory."""
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 262144}
        hf = SMOLLM2 | sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        keys = (*COMMON, *OF_MODEL, "rollout.cpu_kv_cache_mib=256", "validation.every=0")
        config = self.config(tmp_path, hf, *keys)
        memory = estimate(config, 1, Hardware(host_memory_gib=23.0, ranks_per_node=1), plan=False).memory
        assert memory.peak("training")[0] / GIB == pytest.approx(3.21, rel=0.1)

    def test_passes_find_the_freed_memory_of_generation(self, tmp_path):
        """Measured on 2026-11-30: with recomputation the passes do not fill what the engine has freed."""
        keys = (*COMMON, *OF_MODEL, "training.recompute=full", "rollout.cpu_kv_cache_mib=256")
        config = self.config(tmp_path, SMOLLM2, *keys)
        memory = estimate(config, 1, Hardware(host_memory_gib=23.0, ranks_per_node=1), plan=False).memory
        assert memory.peak("training")[0] / GIB == pytest.approx(4.27, rel=0.05)

    def test_a_warning_names_the_tokens_that_fit(self, tmp_path):
        def warning(gib, tokens, hf=SMOLLM2, longest=400):
            keys = f"training.micro_batch_tokens={tokens}", f"rollout.max_response_tokens={longest}"
            config = self.config(tmp_path, hf, *keys)
            return memory_warning(config, Ranks(0, 2, 0, 2, "torchrun", ""), gib * GIB)

        text = warning(16, 16384)
        assert "\n" not in text and "training.micro_batch_tokens=16384" in text and "16.0 GiB" in text
        fits = int(re.search(r"set training.micro_batch_tokens=(\d+)", text)[1])
        assert warning(16, fits) == "" != warning(16, 2 * fits)
        assert warning(8, 16384, hf=TOY, longest=6) == ""  # the quickstart

    def test_a_warning_about_a_class_divides_its_copies_first(self, tmp_path):
        def warning(gib, *keys):
            keys = ("training.backend=transformers", "training.micro_batch_tokens=1024", *keys)
            config = self.config(tmp_path, SMOLLM2, "rollout.max_response_tokens=400", *keys)
            return memory_warning(config, Ranks(0, 2, 0, 2, "torchrun", ""), gib * GIB)

        def needed(*keys):
            return float(re.search(r"need up to ([\d.]+) GiB", warning(1, *keys))[1])

        whole, divided = needed(), needed("training.shard=2")
        assert divided < whole
        assert "; set training.shard=2." in warning((whole + divided) / 2)
        assert "; set training.shard=2 and training.micro_batch_tokens=" in warning(divided * 0.9)


def estimate_of_points(points):
    config = load_config(str(CONFIGS / f"{GRPO}.yaml"), (*LORA, "adapter.in_engine=adapter"))
    return estimate(config, 8, Hardware(), plan=False, points=points)


class TestMemory:
    def test_offloaded_state_is_absent_in_generation(self):
        some = found(GRPO, 8, "training.offload=all").memory
        none = found(GRPO, 8, "training.offload=none").memory
        half = found(GRPO, 8, "training.offload=optimizer").memory
        state = none.stages[0].states["policy"]
        assert none.peak("generation")[0] - some.peak("generation")[0] == state.total
        assert half.peak("generation")[0] - some.peak("generation")[0] == state.weights
        assert none.peak("training") == some.peak("training")
        assert (none.away, half.away, some.away) == (0, state.optimizer, state.optimizer + state.weights)

    def test_a_critic_doubles_the_state(self):
        grpo = found(GRPO, 8).memory.stages[0]
        ppo = found(GRPO, 8, "algorithm=ppo").memory.stages[0]
        head = 152064 * 3584 / 2 - 3584  # a value head in the place of the vocabulary's rows
        assert grpo.states["policy"].total == ppo.states["policy"].total
        assert ppo.states["critic"].weights == pytest.approx(
            grpo.states["policy"].weights - 2 * head, rel=1e-5
        )

    def test_a_critic_on_a_shared_base_adds_its_adapters(self):
        # 28 layers; rows + columns of q, k, v, o, gate, up and down; rank 16
        learned = 28 * 16 * (2 * 2 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944))
        critic = found(GRPO, 8, "algorithm=ppo", "critic.share_base=true", *LORA).memory.stages[0]
        assert critic.states["critic"].weights == pytest.approx(2 * learned, rel=1e-4)

    def test_a_base_in_fp8_takes_one_byte_and_its_factors(self):
        model, fp8 = (found(GRPO, 8, *LORA, *keys).memory.stages[0] for keys in ((), ("adapter.base=fp8",)))
        linear = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
        saved = model.states["policy"].weights - fp8.states["policy"].weights
        assert saved == pytest.approx(linear * (1 - 4 / 128**2), rel=1e-6)

    def test_a_head_that_drafts_is_on_the_last_stage_and_in_the_engine(self):
        plain = ("training.vpp=1", "rollout.ep=1", "rollout.dp_attention=false", "rollout.quantization=none")
        head = ("training.mtp.head_lr=1e-4", "rollout.draft.method=mtp", "rollout.draft.tokens=1")
        without, with_it = (found(V3, 512, *plain, *keys) for keys in ((), head))
        one, other = without.memory, with_it.memory
        heads = [stage.states["mtp"].total for stage in other.stages]
        assert heads[-1] > 0 == sum(heads[:-1]) and other.away >= one.away
        layer = 512 + 64  # the latent and the rotary key, in bfloat16
        assert other.engine.bytes_per_token - one.engine.bytes_per_token == 2 * layer
        # The head reads its layer and the output head for 1 + 0.8 tokens per step.
        assert 1.3 < without.seconds["gen"] / with_it.seconds["gen"] < 1.8
        assert 1 < with_it.seconds["update_actor"] / without.seconds["update_actor"] < 1.5

    def test_points_share_the_base(self):
        one, nine = (estimate_of_points(points) for points in (1, 9))
        learned = one.models["policy"].adapter_parts
        more = 8 * 2 * sum(part.elements for part in learned)
        states = [some.memory.stages[0].states["policy"] for some in (one, nine)]
        assert states[1].weights - states[0].weights == pytest.approx(more, rel=1e-6)
        assert states[1].optimizer == 9 * states[0].optimizer
        assert (
            nine.sequences == 9 * one.sequences
            and nine.seconds["update_actor"] > 8 * one.seconds["update_actor"]
        )

    def test_with_roles_adapters_alone_travel(self):
        merged = found(GRPO, 8, *LORA, plan=True)
        adapter = found(GRPO, 8, *LORA, "adapter.in_engine=adapter", plan=True)
        few = found(GRPO, 8, *LORA, "training.tp=4", plan=True)
        assert merged.refit == adapter.other_refit and adapter.refit == merged.other_refit
        assert merged.refit.all_ranks == 0  # every rank holds what its engine needs
        assert few.refit.all_ranks < few.other_refit.all_ranks < 1.01 * few.refit.all_ranks
        roles = found(GRPO, 8, *LORA, "roles.train=0-3", "roles.rollout=4-7", plan=True)
        assert 0 < roles.other_refit.all_ranks < 0.01 * roles.refit.all_ranks

    def test_other_conflicts_do_not_hide_the_other_form(self):
        both = ("data.curriculum=own:order", "data.train_weights=[1.0]")
        assert found(GRPO, 8, *LORA, *both, plan=True).other_refit is not None
        assert found(GRPO, 8, *LORA, "adapter.kind=dora", plan=True).other_refit is None

    def test_recompute_keeps_only_the_inputs_of_layers(self):
        kept = found(GRPO, 8, "training.recompute=full").memory.stages[0].activations
        everything = found(GRPO, 8).memory.stages[0].activations
        assert everything > 5 * kept

    def test_earlier_stages_keep_more_micro_batches(self):
        stages = found("ppo_deepseek671b", 512, "training.vpp=1").memory.stages
        inputs = (
            4 * 7168 * 10240 / 8 * 2
        )  # of four layers: hidden, tokens of the longest row on a rank, bytes
        for stage in range(1, 13):
            assert stages[stage].activations - stages[stage + 1].activations == pytest.approx(inputs)

    def test_only_the_last_stage_has_a_head(self):
        first, last = found("qwen2.5-32b_dapo_aime_16x8", 128).memory.stages
        assert first.head == 0 < last.head

    def test_the_cache_takes_what_the_share_leaves(self):
        engine = found(GRPO, 8, "rollout.gpu_memory_utilization=0.5").memory.engine
        assert engine.cache == engine.budget - engine.weights - engine.workspace and engine.budget == 40 * GIB
        # Layers, keys and values, heads of a rank, channels, bytes.
        assert engine.bytes_per_token == 28 * 2 * 4 * 128 * 2
        assert engine.cache_tokens == engine.cache // engine.bytes_per_token

    def test_latent_attention_caches_the_latent_on_every_rank(self):
        some = found("ppo_deepseek671b", 512, "rollout.quantization=none")
        engine, model = some.memory.engine, some.models["policy"]
        elements, in_float32 = count_engine(model.parts, some.layout.rollout_placement(model))
        assert engine.bytes_per_token == 61 * (512 + 64) * 2
        assert engine.weights == 2 * (elements + 61 * 128 // 8 * (128 + 128) * 512) + 4 * in_float32
        in_fp8 = found("ppo_deepseek671b", 512).memory.engine
        quantised = 4 * in_fp8.staged / 2  # a quarter is staged in bfloat16
        assert engine.weights - in_fp8.weights == quantised - 4 * quantised // 128**2 > 0.9 * elements

    def test_delta_nets_hold_states_in_place_of_a_cache(self):
        engine = found("qwen3-next-80b-a3b_math_grpo_8x8", 64).memory.engine
        assert engine.bytes_per_token == 12 * 2 * 1 * 256 * 2  # layers, keys and values, heads, channels
        state = 32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2  # and a window of three inputs
        assert engine.states == 64 * 36 * 2 * state / 4  # samples, layers, two of each, ranks

    def test_a_share_too_small_for_one_sequence_is_a_problem(self):
        (problem,) = found(GRPO, 8, "rollout.gpu_memory_utilization=0.1").problems
        assert "KV cache" in problem and "1536" in problem

    def test_layers_keep_what_the_formula_says(self):
        # arXiv:2205.05198 counts, for a layer without dropout and with flash attention, inputs and outputs of
        # the products.
        some = found(GRPO, 8, "training.tp=1", "rollout.tp=1")
        layout, model = layout_of(some.config, 8, 8, some.models), some.models["policy"]
        hidden, ffn, query, pairs = 3584, 18944, 3584, 2 * 512
        products = (hidden + query + pairs) + (query + hidden) + (hidden + 2 * ffn) + (ffn + hidden)
        assert layer_elements(model, 0, layout, 1.0, 1.0) == products + (query + 512) + 2 * hidden
        cut = layer_elements(model, 0, replace(layout, tp=2), 1.0, 1.0)
        assert cut == pytest.approx((products + query + 512 + 2 * hidden) / 2)


class TestChanges:
    def test_the_share_of_the_engine_is_changed_first(self):
        before = found(GRPO, 8, "training.offload=none", "rollout.gpu_memory_utilization=0.7")
        change = cheapest_change(before)
        assert list(change.values) == ["rollout.gpu_memory_utilization"] and change.estimate.problems == []
        assert "generation needs" in before.problems[0]
        assert change.words(before) in verdict(before, change)

    def test_recompute_is_found_for_large_activations(self):
        before = found(GRPO, 8, "training.recompute=none", "training.micro_batch_tokens=131072")
        assert "training needs" in before.problems[0]
        change = cheapest_change(before)
        assert change.world_size == 8 and change.estimate.problems == [] and len(change.values) == 1

    def test_more_ranks_are_the_last_resort(self):
        before = found(GRPO, 8, "training.recompute=full", "rollout.tp=2", gpu_memory_gib=25.0)
        change = cheapest_change(before)
        assert "training needs" in before.problems[0] and change.world_size == 16

    def test_a_machine_too_small_for_any_change(self):
        before = found(GRPO, 8, gpu_memory_gib=5.0)
        assert cheapest_change(before) is None and "none of the changes" in verdict(before, None)

    def test_every_kind_of_change_is_tried(self):
        config = load_config(
            str(CONFIGS / f"{GRPO}.yaml"), ["training.offload=none", "training.recompute=none"]
        )
        sizes = {
            f"training.{name}"
            for name in ("recompute", "micro_batch_tokens", "tp", "pp", "cp", "ep", "offload")
        }
        assert {key for key, _ in single_changes(config, 8)} == sizes | {"rollout.tp"}
        assert with_values(config, {"training.tp": 1}).training.tp == 1 != config.training.tp  # of a copy


def test_ranks_that_share_a_core_take_turns():
    alone, shared = (found(GRPO, 8, cores_per_rank=cores) for cores in (1.0, 0.5))
    for phase in ("gen", "update_actor"):
        assert shared.seconds[phase] == pytest.approx(2 * alone.seconds[phase]), phase
    # With one micro-batch a stage of four waits for three times its work; meanwhile others have its core.
    waiting = ("training.tp=1", "training.pp=4", "training.micro_batch_tokens=100000000")
    alone, shared = (found(GRPO, 8, *waiting, cores_per_rank=cores, update_ms=1e-9) for cores in (1.0, 0.5))
    assert shared.idle["update_actor"] == pytest.approx(alone.idle["update_actor"] * 2 / 3)
    assert (
        alone.seconds["update_actor"] <= shared.seconds["update_actor"] < 1.1 * alone.seconds["update_actor"]
    )


def test_a_teacher_adds_its_weights_and_its_passes():
    alone = found(GRPO, 8)
    taught = found(GRPO, 8, "teacher.path=qwen2.5-32b", "teacher.advantage_coef=0.1")
    state = taught.memory.stages[0].states["teacher 1"]
    assert state.gradients == state.optimizer == 0
    tp = taught.layout.tp * taught.layout.pp
    assert 64e9 / tp < state.weights < 66e9 / tp + 1e9
    assert taught.memory.peak("training")[0] - alone.memory.peak("training")[0] == state.weights
    assert taught.memory.peak("generation") == alone.memory.peak("generation")
    assert taught.seconds["teacher"] > 3 * alone.seconds["update_actor"] / 6


def test_engines_with_fixed_weights_take_their_share():
    keys = ("algorithm=distill", "teacher.path=qwen2.5-7b")
    alone = found(GRPO, 8, *keys).memory
    responds = ("teacher.student_share=0.5", "teacher.teacher_share=0.5")
    both = found(GRPO, 8, *keys, *responds).memory
    for phase in ("training", "generation"):
        assert both.peak(phase)[0] - alone.peak(phase)[0] == pytest.approx(0.2 * 80 * GIB)
    one = found(GRPO, 8, *keys, *responds, "teacher.gpu_memory_utilization=0.18").memory
    assert any(text.startswith("the teacher's share of 14.4 GiB leaves 0.0 GiB") for text in one.problems())


def test_drafts_multiply_the_rows_of_the_sampler():
    def workspace(*keys):
        config = load_config(str(CONFIGS / f"{GRPO}.yaml"), ("rollout.max_concurrent_samples=64", *keys))
        machine = Hardware(host_memory_gib=640.0, ranks_per_node=8)
        return estimate(config, 8, machine, plan=False).memory.engine.workspace

    drafts = workspace("rollout.draft.path=qwen2.5-7b", "rollout.draft.tokens=3")
    assert drafts - workspace() == 3 * 12 * 64 * 152064


class TestCommand:
    def run(self, *arguments):
        return main(["--config", str(CONFIGS / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml"), "--dry-run", *arguments])

    def test_it_fits(self, capsys):
        assert self.run("--world-size", "8") == 0
        out = capsys.readouterr().out
        lines = out.rstrip().splitlines()
        assert [line for line in lines if not line.startswith("not on this machine")][-1].startswith("FITS")
        for word in (
            "policy: gradients",
            "engine: KV cache",
            "refit:",
            "seconds per step",
            "GPU-hours",
            "3,807,910,400",
        ):
            assert word in out

    def test_a_replica_of_several_nodes(self, capsys):
        assert self.run("--world-size", "8") == 0
        assert "hold the weights" not in capsys.readouterr().out
        self.run("--world-size", "8", "--ranks-per-node", "2", "rollout.tp=4")
        out = capsys.readouterr().out
        assert int(re.search(r"generation: 4 ranks on 2 nodes .* take about (\d+) s of gen", out)[1]) > 0
        assert "refit: NCCL" in out

    def test_it_does_not_fit(self, capsys):
        assert self.run("--world-size", "8", "--gpu-memory-gib", "28", "training.recompute=full") == 2
        out = capsys.readouterr().out
        assert "DOES NOT FIT" in out and "cheapest change" in out

    @pytest.mark.parametrize(
        "world_size, option, sentence",
        [
            (8, "rollout.tp=3", "rollout.tp=3 does not divide the world of 8 ranks"),
            (7, "run.seed=1", "error: training.tp=2 times training.pp=1 is 2, which does not divide"),
            (8, "model.path=models/unknown", "--model-shape"),
            (8, "--tflops=-1", "--tflops is -1"),
        ],
    )
    def test_what_is_invalid_is_one_sentence(self, world_size, option, sentence, capsys):
        assert self.run("--world-size", str(world_size), option) == 2
        assert sentence in capsys.readouterr().err

    def test_a_kind_of_gpu_has_its_own_figures(self, capsys):
        assert self.run("--world-size", "8", "--gpu", "A100-40", "--hbm-gb-s", "1000") == 2
        out = capsys.readouterr().out
        assert "40 GiB of a GPU" in out and "the speeds of the options, 312 TFLOP/s x 0.35, 1000 GB/s" in out
        with pytest.raises(SystemExit):
            self.run("--gpu", "b200")
        assert "b200 is none of h100, h200, a100-80, a100-40; describe another GPU" in capsys.readouterr().err

    def test_a_given_shape(self, capsys):
        shape = ("--model-shape", str(CONFIGS / "models" / "qwen3-8b"))
        assert self.run("--world-size", "8", *shape, "model.path=models/unknown") == 0
        assert "8.19 B parameters" in capsys.readouterr().out


def test_a_plan_starts_from_another_layout_if_the_own_one_cannot_run(capsys):
    config = str(CONFIGS / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml")
    assert plan(["--gpus", "6", config, "training.tp=4"]) == 0
    out, err = capsys.readouterr()
    assert "   training.tp=1" in out and "rollout.tp" not in out  # the config has rollout.tp=1 already
    assert err.startswith("warning: another layout is used, because the config's cannot run: ")
    assert plan(["--gpus", "3", config, "training.tp=2"]) == 0
    assert "training.tp=1 training.pp=3" in capsys.readouterr().out  # 7B needs its layers on three GPUs
    assert plan(["--gpus", "1", config]) == 2
    assert "optimizer state take 128 GiB, so use --gpus 2 or more" in capsys.readouterr().out
    large = str(CONFIGS / "qwen2.5-32b_dapo_aime_16x8.yaml")
    assert plan(["--gpus", "16", "--gpu", "a100-40", large]) == 2
    out = capsys.readouterr().out
    assert "nothing fits; with the best layout found, training needs 46.5 GiB" in out
    assert out.endswith("of a GPU; use --gpus 32\n")
