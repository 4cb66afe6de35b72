"""Exhibits: low-rank adapters that do not reach the engine as the trainer has them, or do not learn alone."""

import functools
from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.museum.tour import BF16

MERGED = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8.0")
BESIDE = (*MERGED, "adapter.in_engine=adapter")
SYNCHRONOUS = "weights of engine and trainer"
GAP = "log-probs of engine and trainer"
DIFFER = r"LogprobMismatch: the engine's log-probs differ .*rank \d"
IN_ENGINE = "adapter in the engine's values"
TIMES = r"RefitMismatch: on rank 0, the values of \S+ for the engine contain -?[\d.]+ times its adapter"


def merge_as(bug: Bug, wrong) -> None:
    """Give the engine `wrong(merged, weight, parameter)` in place of merged weights."""
    from rl.features.adapters.trainer import Adapters

    @bug.replaces(Adapters, "merging")
    def other(merging, self):
        return functools.partial(wrong, merging(self))


def after_refits(bug: Bug, change) -> None:
    """Call `change` with the name and the buffer of every A and B in the engine after a refit."""
    from rl.engines import memory

    @bug.replaces(memory, "refit")
    def changed(refit, trainer, engine, **options):
        moved = refit(trainer, engine, **options)
        for name, tensor in engine.slots.buffers(0).items():
            change(name, tensor)
        return moved


@exhibit("verl-project/verl#7495", overrides=MERGED)
@caught_by(IN_ENGINE, TIMES)
def adapter_never_merged(bug: Bug) -> None:
    """Every weight sync pushed the frozen base; for two months it was taken for staleness."""
    merge_as(bug, lambda merged, weight, parameter: parameter)


@exhibit("radixark/miles#3232", overrides=MERGED)
@caught_by(IN_ENGINE, TIMES)
def adapter_merged_twice(bug: Bug) -> None:
    """The adapter's part was counted once per tensor parallel rank, and log-probs drifted apart."""
    merge_as(bug, lambda merged, weight, parameter: merged(weight, merged(weight, parameter)))


@exhibit("NVIDIA/TensorRT-LLM#1668", overrides=(*MERGED, "adapter.kind=rslora"))
@caught_by(IN_ENGINE, TIMES)
def adapter_merged_with_another_scale(bug: Bug) -> None:
    """The scale was alpha / rank although the adapter was trained with alpha / sqrt(rank)."""
    merge_as(bug, lambda merged, weight, base: base + (merged(weight, base) - base) / 2)


@exhibit("PrimeIntellect-ai/prime-rl#1456", overrides=MERGED)
@caught_by(IN_ENGINE, TIMES)
def merged_weights_of_an_earlier_step(bug: Bug) -> None:
    """Merging did not change the weights that were saved; rewards before and after training were equal."""
    from rl.features.adapters.trainer import Adapters

    merging, kept = Adapters.merging, {}

    def first(self):
        merged = merging(self)

        def of_first_steps(weight, parameter):
            if bug.is_on:
                bug.acts()
            else:
                kept[weight.hf] = merged(weight, parameter)
            return kept[weight.hf]

        return of_first_steps

    Adapters.merging = first


@exhibit("vllm-project/vllm#42125", overrides=BESIDE)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*lora_B.* on rank \d")
def adapter_of_the_step_before(bug: Bug) -> None:
    """An adapter that was loaded again under its name was served with values of the one before."""
    from rl.refit import refit

    transfer, kept = refit.transfer, []

    def delayed(plan, sources, *rest):
        kept.append({number: value.clone() for number, value in sources.items()})
        if bug.is_on:
            bug.acts()
            sources = kept[-2]
        return transfer(plan, sources, *rest)

    refit.transfer = delayed


@exhibit("verl-project/verl#7495", overrides=BESIDE, at=1)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*lora_A.* on rank \d")
def adapter_never_written(bug: Bug) -> None:
    """The engine had a place for an adapter, which stayed empty for the whole run."""
    after_refits(bug, lambda name, tensor: tensor.zero_())


@exhibit("verl-project/verl#5220", overrides=BESIDE)
@caught_by(GAP, DIFFER)
@replaces("vllm.v1.engine.input_processor.InputProcessor.process_inputs")
def requests_without_their_adapter(bug: Bug, process_inputs, self, *args, lora_request=None, **options):
    """The engine applies an adapter only to requests that name it; rollouts ran with the base."""
    return process_inputs(self, *args, **options)


@exhibit(
    "verl-project/verl#5220",
    overrides=(
        *BESIDE,
        BF16,
        "objective.kl_coef=0.01",
        "training.optimizer.lr=0.01",
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
    ),
)
@caught_by(GAP, r"LogprobMismatch: the engine's .* In a pass without the adapter")
@replaces("vllm.v1.engine.input_processor.InputProcessor.process_inputs")
def requests_without_their_adapter_in_bfloat16(
    bug: Bug, process_inputs, self, *args, lora_request=None, **options
):
    """The gap stayed below the bound of rounding while the adapter was small, and grew with it."""
    return process_inputs(self, *args, **options)


@exhibit("NovaSky-AI/SkyRL#2250", overrides=BESIDE)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*lora_B.* on rank \d")
def scale_of_the_adapter_applied_twice(bug: Bug) -> None:
    """The engine folded the scale into B in place, and did so again when it loaded the same tensors."""
    after_refits(bug, lambda name, tensor: tensor.mul_(2.0) if "lora_B" in name else None)


@exhibit("Tencent-Hunyuan/UniRL#155", overrides=BESIDE)
@caught_by(IN_ENGINE, TIMES)
@replaces("rl.features.adapters.trainer._scaled")
def scale_of_the_adapter_lost(bug: Bug, scaled, scale, weight, parameter):
    """A renamed layer lost its alpha on the way, so the engine applied the adapter with a scale of 1."""
    return parameter


@exhibit("NVIDIA-NeMo/Automodel#547", overrides=(*MERGED, "agreement.weights_every=1"), at=1)
@caught_by("clipped gradient", r"WrongReduction: rank 0 found .*, or counts weights that do not learn")
def base_trained_beside_the_adapter(bug: Bug) -> None:
    """With tensor parallelism all parameters had requires_grad again, not only the adapter's."""
    from rl.training import engine

    with_gradients = engine.with_gradients

    def of_all(chunks, *args):
        bug.acts()
        return with_gradients([chunk.requires_grad_() for chunk in chunks], *args)

    engine.with_gradients = of_all


@exhibit("NVIDIA/Megatron-LM#5956", ranks=2, overrides=(*MERGED, "training.overlap_gradients=on"))
@caught_by(
    "probe of the reduced gradient",
    r"WrongReduction: the gradients of \S+lora_[AB]\S* on all ranks add up .* not summed exactly once",
)
@replaces("rl.training.gradients.finalize_model_grads")
def overlapped_gradients_of_the_adapter_divided(bug: Bug, finalize, models, *args, **options):
    """Gradients were divided by a parallel size although the loss had its global denominator."""
    finalize(models, *args, **options)
    for model in models:
        model.scale_gradients(0.5)


@exhibit("adapter-hub/adapters#260", overrides=MERGED, at=0)
@caught_by(
    "adapters learn",
    r"WrongLearning: adapter check: rank 0 of the policy has adapters that the optimizer lacks",
)
def adapter_not_in_the_optimizer(bug: Bug) -> None:
    """The optimizer was built before the adapter was added, and never updated it."""
    from rl.training import engine

    def later(model, learns: bool) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.requires_grad_(learns)

    @bug.replaces(engine, "with_gradients")
    def without(with_gradients, chunks, *args):
        later(chunks[0], False)
        return with_gradients(chunks, *args)

    @bug.replaces(engine, "build_optimizer")
    def too_early(build_optimizer, adam, dtype, wrapped):
        optimizer = build_optimizer(adam, dtype, wrapped)
        later(wrapped[0].module, True)
        return optimizer


@exhibit(
    "modelscope/mcore-bridge#173", ranks=2, overrides=(*MERGED, "training.tp=2", "agreement.weights_every=1")
)
@caught_by("replicas of the weights", r"Disagreement: .*lora_A.* of the policy on rank \d differ")
@replaces("rl.checks.checks.Checks.weights")
def copies_of_A_differ_between_tensor_parallel_ranks(bug: Bug, check, self, name, model):
    """Gradients of the replicated factor were not summed, so each rank trained another copy."""
    if bug.rank == 1:
        for part, parameter in model.learned_map.parameters.items():
            if "linear_qkv.lora_A" in part:
                parameter.data.mul_(1.01)  # more than the distance of two numbers in bfloat16
    check(self, name, model)


@exhibit("NovaSky-AI/SkyRL#2069", ranks=2, overrides=(*MERGED, "adapter.init=pissa", "training.tp=2"), at=0)
@caught_by(
    "adapters learn", r"WrongLearning: adapter check: what adapter.init=pissa left of \S+ has the size"
)
@replaces("torch.linalg.svd")
def PiSSA_of_a_rank_s_part(bug: Bug, svd, whole, **options):
    """Each tensor parallel rank decomposed the weight for itself, and the parts did not fit together."""
    part = whole.clone()
    part[len(whole) // 2 :] = 0
    return svd(part, **options)


@exhibit("huggingface/peft#1474", overrides=("adapter.kind=dora", "adapter.rank=4"), at=0)
@caught_by(
    "adapters learn", r"WrongLearning: adapter check: .* has rows whose lengths DoRA's gradient does not"
)
def lengths_of_rows_that_learn(bug: Bug) -> None:
    """DoRA's gradient went through the lengths of rows, which the paper treats as constants."""
    from rl.features.adapters.layers import AdapterSum

    bug.acts()
    AdapterSum._row_lengths = AdapterSum._row_lengths.__wrapped__  # without no_grad


@exhibit("PaddlePaddle/PaddleNLP#9427", overrides=MERGED, at=0)
@caught_by("adapters learn", r"WrongLearning: adapter check: \S+lora_A.weight .* equals \S+lora_A.weight")
@replaces("rl.features.adapters.trainer._kaiming")
def matrices_A_drawn_alike(bug: Bug, kaiming, weight, seed):
    """Parts of A began with the same random numbers, because they shared the state of a generator."""
    return kaiming(replace(weight, hf=(weight.megatron,)), seed)


@exhibit("modelscope/ms-swift#560", overrides=("adapter.kind=dora", "adapter.rank=4", BF16), at=0)
@caught_by("weights of the files", r"ChangedSinceStart: \S+ of the policy with its new adapter differs from")
@replaces("rl.models.adapters._low_rank")
def magnitudes_of_DoRA_in_bfloat16(bug: Bug, low_rank, *args):
    """The dtype of the magnitudes was the model's, so that each row began with another length."""
    pair = low_rank(*args)
    return replace(pair, magnitude=replace(pair.magnitude, float32=False))


@exhibit(
    "areal-project/AReaL#1385",
    overrides=(*BESIDE, "sweep.adapters=[{training.optimizer.lr: 1e-3}, {training.optimizer.lr: 2e-3}]"),
)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*lora_B.* on rank \d")
@replaces("rl.refit.refit.held_by")
def all_points_in_the_first_slot(bug: Bug, held_by, engine, adapter=0):
    """The name of an adapter was lost, so that the default adapter stood for each of them."""
    return held_by(engine)


@exhibit(
    "sisinflab/warprec#126",
    overrides=(
        *BESIDE,
        "sweep.adapters=[{}, {training.optimizer.lr: 2e-3}]",
        "sweep.stop=median",
        "sweep.first=3",
    ),
    resumes=True,
)
@caught_by(
    "metric log", r"CheckFailed: sweep check: sweep.stop=median has the metrics of point 0 up to step 1"
)
@replaces("rl.features.early_stop.early_stop.EarlyStop.remember")
def metrics_before_a_resume_lost(bug: Bug, remember, self, point, records, **options):
    """After a pause the rule ended fewer runs, because it had lost their metrics."""
    remember(self, point, records[:-1], **options)


@exhibit(
    "huggingface/peft#2122",
    overrides=(
        "adapter.kind=dora",
        "training.optimizer.lr=0.01",
        "training.optimizer.warmup_steps=0",
        "training.prompts_per_minibatch=2",
    ),
)
@caught_by(GAP, r"LogprobMismatch: .* In a pass with the adapter merged into the weights, which its layers")
@replaces("rl.features.adapters.layers.AdapterSum.add")
def bias_multiplied_by_the_factors_of_dora(bug: Bug, add, self, x, out, bias):
    """The output of the layer contained the bias when it was multiplied."""
    return add(self, x, out, None)
