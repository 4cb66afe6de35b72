"""Exhibits: weights on their way from the trainer to the engine."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.museum.tour import BESIDE, BF16, ROLES

SYNCHRONOUS = "weights of engine and trainer"
DIFFER = r"RefitMismatch: after the refit .* on rank \d"


def without(part: str, bug: Bug) -> None:
    """Leave out the copies of weights with `part` in their name, for example "mlp.down_proj"."""
    from rl.refit import refit

    @bug.replaces(refit, "transfer")
    def some(transfer, plan, *ends):
        return transfer(replace(plan, copies=[copy for copy in plan.copies if part not in copy.hf]), *ends)


def afterwards(bug: Bug, change) -> None:
    """Call `change` with the engine's weights by vLLM's name after a refit."""
    from rl.engines import memory

    @bug.replaces(memory, "refit")
    def changed(refit, trainer, engine, **options):
        import torch

        moved = refit(trainer, engine, **options)
        with torch.no_grad():
            change(engine, engine.weights())
        engine.weights_changed()
        return moved


@exhibit("huggingface/trl#5312")
@caught_by(SYNCHRONOUS, DIFFER)
@replaces("rl.engines.memory.refit")
def refit_skipped(bug: Bug, refit, trainer, engine, **options):
    """After sleep mode the engine generated with old weights; rewards stopped rising."""
    from rl.refit.transfer import BytesMoved

    return BytesMoved()


@exhibit("huggingface/trl#5932")
@caught_by(SYNCHRONOUS, DIFFER)
@replaces("rl.engines.memory.MemorySharing.to_generation")
def version_raised_without_weights(bug: Bug, to_generation, self, *args):
    """The trainer counted its version up although the engine had not taken the weights."""
    self.engines.rollout.weights_version = self.engines.policy.version
    return to_generation(self, *args)


@exhibit("NovaSky-AI/SkyRL#1737", overrides=(BF16, "training.optimizer.lr=0.02"))
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*model\.norm\.weight.* on rank 0")
def one_norm_not_refitted_in_bfloat16(bug: Bug) -> None:
    """The last norm kept its first values in the engine, a difference of a few roundings."""
    without("model.norm", bug)


@exhibit("NovaSky-AI/SkyRL#1737")
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*model\.layers\.1\..* on rank 0")
def one_layer_not_refitted(bug: Bug) -> None:
    """Each chunk of a weight sync restored the layers that were absent from it."""
    without(".layers.1.", bug)


@exhibit("NVIDIA-NeMo/Megatron-Bridge#4199", model="deepseek-v3", at=1)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*e_score_correction_bias.* on rank 0")
def expert_bias_not_refitted(bug: Bug) -> None:
    """The router's bias was missing in the conversion, so the two sides chose other experts."""
    without("e_score_correction_bias", bug)


@exhibit("huggingface/trl#7085", model="qwen2-blocks", overrides=(BF16, "rollout.quantization=fp8"))
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*model\.layers\..* on rank 0")
@replaces("rl.features.fp8_engine.weights._reload")
def fp8_factors_of_the_step_before(bug: Bug, reload, layer, tensors):
    """A sync rewrote the values in FP8 and left their scales, which belonged to older weights."""
    kept = {name: layer.get_parameter(name).clone() for name in tensors if name.endswith("_scale_inv")}
    return reload(layer, {**tensors, **kept})


@exhibit("allenai/open-instruct#1627")
@caught_by(SYNCHRONOUS, DIFFER)
def weights_of_the_step_before_sent(bug: Bug) -> None:
    """After a resume the weight sync ran at the wrong step, and the actors kept other weights."""
    from rl.refit import refit

    kept: list = []
    original = refit.transfer

    def delayed(plan, sources, *rest):
        kept.append({number: weight.clone() for number, weight in sources.items()})
        if bug.is_on:
            bug.acts()
            sources = kept[-2]
        return original(plan, sources, *rest)

    refit.transfer = delayed


@exhibit("PrimeIntellect-ai/prime-rl#3524")
@caught_by(SYNCHRONOUS, DIFFER)
@replaces("rl.refit.refit.transfer")
def weights_rounded_to_bfloat16_on_the_way(bug: Bug, transfer, plan, sources, *rest):
    """The transfer rounded float32 routers, and the mismatch grew with every update."""
    return transfer(plan, {n: weight.bfloat16().to(weight) for n, weight in sources.items()}, *rest)


@exhibit("areal-project/AReaL#1372")
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*q_proj.* on rank 0")
def query_heads_permuted(bug: Bug) -> None:
    """A conversion of fused qkv weights put the heads in another order."""

    def change(engine, weights):
        queries = weights["model.layers.0.self_attn.qkv_proj.weight"][:128]
        queries.copy_(queries.roll(32, 0))

    afterwards(bug, change)


@exhibit("sgl-project/sglang#32430")
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*gate_proj.* on rank 0")
def gate_and_up_exchanged(bug: Bug) -> None:
    """A kernel read the halves of w13 in the other order; GSM8K fell from 94 % to 0."""

    def change(engine, weights):
        both = weights["model.layers.0.mlp.gate_up_proj.weight"]
        both.copy_(both.roll(len(both) // 2, 0))

    afterwards(bug, change)


@exhibit("NovaSky-AI/SkyRL#1680", model="qwen3-moe", ranks=2, overrides=("training.ep=2",), at=1)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*experts.* on rank \d")
def experts_in_another_order(bug: Bug) -> None:
    """After the first weight sync the experts' weights were in a layout that the kernels misread."""

    def change(engine, weights):
        for name, weight in weights.items():
            if "w13" in name:
                weight.copy_(weight.roll(len(weight) // 2, 0))

    afterwards(bug, change)


@exhibit("vllm-project/vllm-gguf-plugin#103", ranks=2, overrides=("rollout.tp=2", "training.tp=2"))
@caught_by(SYNCHRONOUS, DIFFER)
def tensor_parallel_shards_exchanged(bug: Bug) -> None:
    """The loader took rank 0 by default, so ranks had the shard of another rank."""

    def change(engine, weights):
        import torch.distributed as dist

        for name, weight in weights.items():
            if "gate_up_proj" in name:
                both = [weight.clone(), weight.clone()]
                dist.all_gather(both, weight)
                weight.copy_(both[1 - dist.get_rank()])

    afterwards(bug, change)


def unplanned(bug: Bug, part: str) -> None:
    """Leave weights with `part` in their name out of the refit's plan. Only planned weights are sent."""
    from rl.refit import refit

    @bug.replaces(refit, "plan_of")
    def some(plan_of, *args):
        def known(regions):
            return tuple(region for region in regions if part not in region.hf)

        def message(found):
            regions = known(found.regions)
            share = sum(map(_elements, regions)) / sum(map(_elements, found.regions))
            return replace(found, regions=regions, num_bytes=int(found.num_bytes * share))

        plan = plan_of(*args)
        batches = [
            replace(
                batch, sends=tuple(map(message, batch.sends)), receives=tuple(map(message, batch.receives))
            )
            for batch in plan.batches
        ]
        return replace(plan, copies=known(plan.copies), batches=tuple(batches))


def _elements(region) -> int:
    from rl.models.boxes import volume

    return volume(region.box)


@exhibit("NovaSky-AI/SkyRL#1505", at=1)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*layers\.1\.mlp\.down_proj.* on rank 0")
def plan_omits_a_weight(bug: Bug) -> None:
    """The lists of weights to convert and of weights to send differed; some were never sent."""
    unplanned(bug, "layers.1.mlp.down_proj")


@exhibit("NovaSky-AI/SkyRL#1505", at=1, overrides=("model.dtype=bfloat16",))
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*layers\.1\.mlp\.down_proj.* on rank 0")
def plan_omits_a_weight_in_bfloat16(bug: Bug) -> None:
    """The lists of weights to convert and of weights to send differed; some were never sent."""
    unplanned(bug, "layers.1.mlp.down_proj")


@exhibit("NovaSky-AI/SkyRL#1505", ranks=2, at=1, overrides=("training.tp=2", "model.dtype=bfloat16"))
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit .*layers\.1\.mlp\.down_proj.* on rank \d")
def plan_omits_a_weight_between_ranks(bug: Bug) -> None:
    """The lists of weights to convert and of weights to send differed; some were never sent."""
    unplanned(bug, "layers.1.mlp.down_proj")


@exhibit("NovaSky-AI/SkyRL#1505", ranks=2, at=0, overrides=(*ROLES, "refit.check_every=1"))
@caught_by(
    SYNCHRONOUS, r"RefitMismatch: after the refit .*layers\.1\.mlp\.down_proj.* differs from the trainer's"
)
def plan_omits_a_weight_between_roles(bug: Bug) -> None:
    """The lists of weights to convert and of weights to send differed; some were never sent."""
    unplanned(bug, "layers.1.mlp.down_proj")


@exhibit("NovaSky-AI/SkyRL#1505", at=1, overrides=BESIDE)
@caught_by(SYNCHRONOUS, r"RefitMismatch: after the refit \d+ weights differ: model.layers\.1\..* on rank 0")
def plan_omits_an_adapter(bug: Bug) -> None:
    """The lists of weights to convert and of weights to send differed; some were never sent."""
    unplanned(bug, "layers.1.")


@exhibit("NVIDIA/Megatron-LM#5844", at=1, model="qwen3-moe")
@caught_by(SYNCHRONOUS, r"RefitMismatch: \d+ weights cannot be compared: .*w13.* on rank 0: \d+ of its")
def list_of_weights_lacks_experts(bug: Bug) -> None:
    """A converter expected the experts under other names, and left all of them as they were at the start."""
    from rl.refit import refit

    @bug.replaces(refit, "plan_weights")
    def some(plan_weights, weights, *args, **options):
        left = [weight for weight in weights if ".experts." not in weight.hf[0]]
        return plan_weights(left, *args, **options)


@exhibit("verl-project/verl#6947", at=1, model="deepseek-v3-mtp", overrides=("rollout.draft.method=mtp",))
@caught_by(SYNCHRONOUS, r"RefitMismatch: \d+ weights cannot be compared: .*layers.3.enorm.* on rank 0: 0 of")
@replaces("rl.features.drafts.mtp.MtpPart.served_map")
def list_of_weights_lacks_the_head(bug: Bug, served_map, self, weight_map):
    """The head that drafts tokens was not in the list of weights to send, and kept its first weights."""
    return weight_map


@exhibit("vllm-project/vllm#32718", ranks=2, overrides=(*ROLES, "training.optimizer.lr=1e-2", BF16))
@caught_by(SYNCHRONOUS, r"RefitMismatch: rank 1 acknowledged version 1, but \d+ of \d+ compared parts")
def update_is_acknowledged_only(bug: Bug):
    """The engine reported the reload as done, but had read the old weights from a cache."""
    from rl.features.roles.link import Link

    receive = Link.receive_weights

    def acknowledge(self, version):
        bug.step = version + 1  # a generator has no steps of its own
        held = {name: weight.detach().clone() for name, weight in self._engine.weights().items()}
        moved = receive(self, version)
        if version:
            for name, weight in self._engine.weights().items():
                weight.detach().copy_(held[name])
            self._engine.weights_changed()
            bug.acts()
        return moved

    Link.receive_weights = acknowledge  # type: ignore[method-assign]


@exhibit("deepspeedai/DeepSpeed#8345", at=0)
@caught_by("function of the files", r"LogprobMismatch: start check: transformers computes log-probs from the")
@replaces("rl.models.rope.rope_parameters")
def base_of_the_rotation_is_a_default(bug: Bug, parameters, hf, **options):
    """The key of config.json had moved, and the default took its place, in every part of the program."""
    return parameters(hf, **options) | {"rope_theta": 500.0}


@exhibit("NVIDIA-NeMo/Megatron-Bridge#3162", at=0)
@caught_by("weights of the files", r"ChangedSinceStart: .*o_proj.weight of the policy are not those in the")
@replaces("rl.training.engine.load_hf")
def projection_transposed_by_the_load(bug: Bug, load, directory, weight_map):
    """A matrix was transposed by the load and again by the export, so engine and trainer agreed."""
    load(directory, weight_map)
    for weight, parameter in weight_map.local():
        if weight.hf[0].endswith("o_proj.weight"):
            parameter.data.copy_(parameter.data.T.clone())
