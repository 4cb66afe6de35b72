"""Exhibits: low-rank adapters that do not reach the engine as the trainer has them, or do not learn alone."""

import functools

from tests.museum.museum import Bug, exhibit

MERGED = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=8.0")
BESIDE = (*MERGED, "adapter.in_engine=adapter")
SYNCHRONOUS = "weights of engine and trainer"
GAP = "log-probs of engine and trainer"
DIFFER = r"LogprobMismatch: the engine's log-probs differ .*rank \d"


def merge_as(bug: Bug, wrong) -> None:
    """Give the engine `wrong(merged, weight, parameter)` in place of merged weights."""
    from rl.training.adapter import Adapters

    @bug.replaces(Adapters, "merging")
    def other(merging, self):
        return functools.partial(wrong, merging(self))


def after_refits(bug: Bug, change) -> None:
    """Call `change` with the name and the buffer of every A and B in the engine after a refit."""
    from rl.engines import memory

    @bug.replaces(memory, "refit")
    def changed(refit, trainer, engine, **options):
        moved = refit(trainer, engine, **options)
        for name, tensor in engine.adapters.buffers(0).items():
            change(name, tensor)
        return moved


@exhibit(
    name="adapter never merged",
    peer="verl-project/verl#7495",
    saw="Every weight sync pushed the frozen base; for two months it was taken for staleness.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=MERGED,
)
def never_merged(bug: Bug) -> None:
    merge_as(bug, lambda merged, weight, parameter: parameter)


@exhibit(
    name="adapter merged twice",
    peer="radixark/miles#3232",
    saw="The adapter's part was counted once per tensor parallel rank, and log-probs drifted apart.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=MERGED,
)
def merged_twice(bug: Bug) -> None:
    merge_as(bug, lambda merged, weight, parameter: merged(weight, merged(weight, parameter)))


@exhibit(
    name="adapter merged with another scale",
    peer="NVIDIA/TensorRT-LLM#1668",
    saw="The scale was alpha / rank although the adapter was trained with alpha / sqrt(rank).",
    caught_by=GAP,
    expects=DIFFER,
    overrides=(*MERGED, "adapter.kind=rslora"),
)
def merged_with_scale(bug: Bug) -> None:
    merge_as(bug, lambda merged, weight, base: base + (merged(weight, base) - base) / 2)


@exhibit(
    name="merged weights of an earlier step",
    peer="PrimeIntellect-ai/prime-rl#1456",
    saw="Merging did not change the weights that were saved; rewards before and after training were equal.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=MERGED,
)
def merged_once(bug: Bug) -> None:
    from rl.training.adapter import Adapters

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


@exhibit(
    name="adapter of the step before",
    peer="vllm-project/vllm#42125",
    saw="An adapter that was loaded again under its name was served with values of the one before.",
    caught_by=SYNCHRONOUS,
    expects=r"RefitMismatch: after the refit .*lora_B.* on rank \d",
    overrides=BESIDE,
)
def adapter_before(bug: Bug) -> None:
    from rl.refit import refit

    transfer, kept = refit.transfer, []

    def delayed(plan, sources, *rest):
        kept.append({number: value.clone() for number, value in sources.items()})
        if bug.is_on:
            bug.acts()
            sources = kept[-2]
        return transfer(plan, sources, *rest)

    refit.transfer = delayed


@exhibit(
    name="adapter never written",
    peer="verl-project/verl#7495",
    saw="The engine had a place for an adapter, which stayed empty for the whole run.",
    caught_by=SYNCHRONOUS,
    expects=r"RefitMismatch: after the refit .*lora_A.* on rank \d",
    overrides=BESIDE,
    at=1,
)
def adapter_never_written(bug: Bug) -> None:
    after_refits(bug, lambda name, tensor: tensor.zero_())


@exhibit(
    name="requests without their adapter",
    peer="verl-project/verl#5220",
    saw="The engine applies an adapter only to requests that name it; rollouts ran with the base.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=BESIDE,
)
def requests_without(bug: Bug) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    @bug.replaces(LLMEngine, "add_request")
    def nameless(add_request, self, *args, lora_request=None, **options):
        return add_request(self, *args, **options)


@exhibit(
    name="scale of the adapter applied twice",
    peer="NovaSky-AI/SkyRL#2250",
    saw="The engine folded the scale into B in place, and did so again when it loaded the same tensors.",
    caught_by=SYNCHRONOUS,
    expects=r"RefitMismatch: after the refit .*lora_B.* on rank \d",
    overrides=BESIDE,
)
def scaled_twice(bug: Bug) -> None:
    after_refits(bug, lambda name, tensor: tensor.mul_(2.0) if "lora_B" in name else None)


@exhibit(
    name="scale of the adapter lost",
    peer="Tencent-Hunyuan/UniRL#155",
    saw="A renamed layer lost its alpha on the way, so the engine applied the adapter with a scale of 1.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=BESIDE,
)
def scale_lost(bug: Bug) -> None:
    from rl.refit import values

    @bug.replaces(values, "_scaled")
    def unscaled(scaled, scale, weight, parameter):
        return parameter


@exhibit(
    name="base trained beside the adapter",
    peer="NVIDIA-NeMo/Automodel#547",
    saw="With tensor parallelism all parameters had requires_grad again, not only the adapter's.",
    caught_by="adapters learn",
    expects=r"WrongLearning: adapter check: rank 0 of the policy has frozen weights that have changed",
    overrides=(*MERGED, "agreement.weights_every=1"),
    at=1,
)
def base_trained(bug: Bug) -> None:
    from rl.training import engine

    with_gradients = engine.with_gradients

    def of_all(model, *args):
        bug.acts()
        return with_gradients(model.requires_grad_(), *args)

    engine.with_gradients = of_all


@exhibit(
    name="adapter not in the optimizer",
    peer="adapter-hub/adapters#260",
    saw="The optimizer was built before the adapter was added, and never updated it.",
    caught_by="adapters learn",
    expects=r"WrongLearning: adapter check: rank 0 of the policy has adapters that the optimizer lacks",
    overrides=MERGED,
    at=0,
)
def not_in_optimizer(bug: Bug) -> None:
    from rl.training import engine

    def later(model, learns: bool) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.requires_grad_(learns)

    @bug.replaces(engine, "with_gradients")
    def without(with_gradients, model, *args):
        later(model, False)
        return with_gradients(model, *args)

    @bug.replaces(engine, "build_optimizer")
    def too_early(build_optimizer, adam, dtype, wrapped):
        optimizer = build_optimizer(adam, dtype, wrapped)
        later(wrapped.module, True)
        return optimizer


@exhibit(
    name="copies of A differ between tensor parallel ranks",
    peer="modelscope/mcore-bridge#173",
    saw="Gradients of the replicated factor were not summed, so each rank trained another copy.",
    caught_by="replicas of the weights",
    expects=r"Disagreement: .*lora_A.* of the policy on rank \d differ",
    ranks=2,
    overrides=(*MERGED, "training.tp=2", "agreement.weights_every=1"),
)
def copies_differ(bug: Bug) -> None:
    from rl.checks.checks import Checks

    @bug.replaces(Checks, "_weights")
    def after_a_change(check, self, name, model):
        if bug.rank == 1:
            for name, parameter in model.learned_map.parameters.items():
                if "linear_qkv.lora_A" in name:
                    parameter.data.mul_(1.001)
        check(self, name, model)
