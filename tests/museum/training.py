"""Exhibits: updates, gradients and the reference policy."""

from typing import Any

from tests.museum.museum import Bug, caught_by, exhibit, replaces

COUNT = "counted tokens"
REDUCTION = "probe of the reduced gradient"
CLIPPED = "clipped gradient"
SLOPE = "gradient of the loss"
MORE = ("data.prompts_per_step=16", "training.micro_batch_tokens=400")
BACKWARD = r"WrongBackward: the gradient of the model is not the slope of its log-probs"


@exhibit("NVIDIA/Megatron-LM#1685", ranks=2)
@caught_by(REDUCTION, r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once")
@replaces("rl.training.gradients.finalize_model_grads")
def gradients_not_reduced(bug: Bug, finalize, *args, **options):
    """The example's loop left out finalize_model_grads, so every rank trained on its own samples."""


@exhibit("NVIDIA/Megatron-LM#775", ranks=2)
@caught_by(REDUCTION, r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once")
@replaces("rl.training.gradients.finalize_model_grads")
def gradients_reduced_twice(bug: Bug, finalize, model, *args, **options):
    """The reduction ran at the end of the backward pass and again at the end of the step."""
    finalize(model, *args, **options)
    finalize(model, *args, **options)


@exhibit("NVIDIA/Megatron-LM#5956", ranks=2)
@caught_by(REDUCTION, r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once")
@replaces("rl.training.gradients.finalize_model_grads")
def gradients_divided_by_the_replicas(bug: Bug, finalize, models, *args, **options):
    """Gradients were divided by a parallel size although the loss had its global denominator."""
    finalize(models, *args, **options)
    for model in models:
        model.scale_gradients(0.5)


@exhibit("NVIDIA-NeMo/RL#3716", ranks=2, model="qwen3-moe", overrides=("training.tp=2",))
@caught_by(
    REDUCTION,
    r"WrongReduction: the tensor parallel ranks .* copies of model.layers.\*.self_attn.q_norm.weight",
)
@replaces("megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads")
def norms_of_heads_not_summed(bug: Bug, reduce, models, config, *args):
    """The norms of queries and keys had the gradients of the heads of each tensor parallel rank."""
    import dataclasses

    norms = [p for m in models for name, p in m.named_parameters() if "self_attention.q_layernorm" in name]
    for norm in norms:
        norm.sequence_parallel = False
    reduce(models, dataclasses.replace(config, qk_layernorm=False), *args)
    for norm in norms:
        norm.sequence_parallel = True


@exhibit("NVIDIA-NeMo/Automodel#3816", ranks=2, overrides=("training.optimizer.clip_grad=0.1",))
@caught_by(CLIPPED, r"WrongReduction: rank \d found a gradient norm of .* the clipped gradient")
@replaces("rl.training.engine.clip_and_step")
def clipped_by_the_norm_of_the_own_shard(bug: Bug, clip_and_step, optimizer, norm):
    """Each rank clipped by the norm of the gradients that it holds."""
    clip_and_step(optimizer, norm * (0.5 + 0.25 * bug.rank))


@exhibit("modelscope/ms-swift#10117", overrides=("training.micro_batch_tokens=40",))
@caught_by(SLOPE, r"WrongGradient: the gradient that arrived at the model's outputs differs .* by 0\.[5-9]")
@replaces("rl.training.engine.TrainingEngine.update")
def divided_by_the_micro_batches_too(bug: Bug, update, self, batch, plan, loss, **options):
    """The loss had its denominators, and was divided by the number of micro-batches once more."""

    def divided(micro):
        value, metrics = loss(micro)
        return value / max(2, len(plan[0])), metrics

    return update(self, batch, plan, divided, **options)


@exhibit("NVIDIA-NeMo/RL#3544", ranks=2, at=2)
@caught_by(
    "state of the optimizer", r"StateChanged: \d+ sampled elements of the optimizer's moments .* on rank 1"
)
@replaces("rl.training.engine.TrainingEngine.reload")
def moments_lost_in_host_memory(bug: Bug, reload, self):
    """The moments were lost while the optimizer's state was in host memory, here on one rank."""
    reload(self)
    if bug.rank == 1:
        for state in self.optimizer.chained_optimizers[0].optimizer.state.values():
            state["exp_avg"].zero_()


@exhibit("TensorAuto/OpenTau#185", resumes=True, overrides=("model.dtype=bfloat16",))
@caught_by("state of the optimizer", r"StateChanged: \d+ sampled elements .* its last update or its load")
@replaces("rl.training.engine.TrainingEngine._begin_update")
def master_weights_made_again_in_the_first_update(bug: Bug, begin_update, self):
    """After a resume the master weights were made from the rounded weights."""
    if not self.num_updates:
        self.optimizer.reload_model_params()
    begin_update(self)


@exhibit("PrimeIntellect-ai/prime-rl#2562", ranks=2)
@caught_by(COUNT, r"WrongTokens: an update counted 1 times .* rank 1 counted .* and divided by")
@replaces("rl.phases.minibatches.MinibatchPlan.totals")
def mean_over_the_own_tokens(bug: Bug, totals, self, batch):
    """Each rank divided by its own number of tokens, times the number of ranks."""
    from dataclasses import replace

    found = totals(self, batch)
    return replace(found, num_tokens=found.num_tokens * (5 / 4 if bug.rank else 5 / 6))  # shares 0.4 and 0.6


@exhibit("modelscope/ms-swift#10165", ranks=2)
@caught_by(COUNT, r"WrongTokens: an update counted .* rank 1 counted .* divided by")
@replaces("rl.phases.minibatches.MinibatchPlan.totals")
def denominators_of_each_rank(bug: Bug, totals, self, batch):
    """Each rank divided by its own number of tokens, so short responses counted more."""
    from dataclasses import replace

    own = sorted(i for micro in self.micro_batches[bug.rank] for i in micro)
    return replace(totals(self, batch), num_tokens=float(batch.mask[batch.tokens_of(own)].sum()))


@exhibit("NVIDIA-NeMo/labs-molt#113", overrides=("training.micro_batch_tokens=40",))
@caught_by(COUNT, r"WrongTokens: an update counted .* rank 0 counted")
@replaces("rl.training.engine.TrainingEngine.update")
def micro_batch_dropped(bug: Bug, update, self, batch, plan, loss, **options):
    """Samples after the last complete accumulation window were dropped."""
    return update(self, batch, [rank[:-1] for rank in plan], loss, **options)


@exhibit("verl-project/verl#1506", ranks=2)
@caught_by("finite gradient norm", r"FloatingPointError: the gradient norm is nan; .* on rank 1")
@replaces("rl.phases.policy_gradient.aggregate")
def gradient_that_is_not_a_number_skipped(bug: Bug, aggregate, losses, *args, **options):
    """An update with a gradient norm of nan is skipped with a printed warning."""
    return aggregate(losses * (float("nan") if bug.rank == 1 else 1.0), *args, **options)


@exhibit("NVIDIA-NeMo/RL#3722", overrides=("objective.kl_coef=0.01",))
@caught_by("sample of the reference weights", r"the reference weights of rank 0 have changed")
@replaces("rl.training.engine.TrainingEngine.reference_weights")
def reference_is_the_trained_model(bug: Bug, reference_weights, self):
    """The KL divergence was measured from weights that moved with the policy."""
    self.reference.weights = [parameter.detach() for parameter in self.model.parameters()]
    return reference_weights(self)


@exhibit("huggingface/trl#2042", overrides=("objective.kl_coef=0.01",), at=1)
@caught_by(
    "passes of other models",
    r"LogprobMismatch: (before the first update|reference check: .* or a pass is random)",
)
def dropout_in_the_reference_pass(bug: Bug) -> None:
    """With dropout the log-probs fluctuated against the reference's."""
    from rl.training.engine import TrainingEngine

    original = TrainingEngine.reference_weights

    def with_dropout(self):
        import contextlib

        import torch

        @contextlib.contextmanager
        def both():
            hook = self.model.embedding.register_forward_hook(
                lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1)
            )
            with original(self):
                yield
            hook.remove()

        bug.acts()
        return both()

    TrainingEngine.reference_weights = with_dropout


@exhibit("NVIDIA/Megatron-LM#6920", ranks=2, overrides=("agreement.weights_every=1",))
@caught_by(
    "replicas of the weights", r"Disagreement: .*final_layernorm.weight of the policy on rank \d differ"
)
@replaces("rl.checks.checks.Checks.weights")
def replicas_of_a_weight_drift_apart(bug: Bug, check, self, name, model):
    """After a load the ranks' copies were not synchronised, without an error."""
    if bug.rank == 1:
        model.model.decoder.final_layernorm.weight.data.mul_(1.001)
    check(self, name, model)


@exhibit("NVIDIA/Megatron-LM#844", model="qwen2-tied", ranks=2, overrides=("training.pp=2",), at=1)
@caught_by(
    REDUCTION, r"rank \d.*WrongReduction: the gradients of model.embed_tokens.weight on all ranks add up"
)
def gradients_of_a_tied_embedding_not_added(bug: Bug) -> None:
    """First and last pipeline stage updated their copies of the embedding by different gradients."""
    import sys

    from megatron.core.distributed import finalize_model_grads

    module = sys.modules[finalize_model_grads.__module__]

    @bug.replaces(module, "_allreduce_word_embedding_grads")
    def nothing(allreduce, *args, **options):
        pass


@exhibit("vllm-project/speculators#900", overrides=("training.optimizer.warmup_steps=10",), resumes=True)
@caught_by("schedule of the learning rate", r"WrongLearningRate: an update used the learning rate \S+, but")
@replaces("rl.training.engine.TrainingEngine.update")
def updates_count_steps_from_the_resume(bug: Bug, update, self, *args, lr, **options):
    """After a resume the learning rate began its warm-up again, and the schedule did not know."""
    return update(self, *args, lr=lr / 3, **options)


@exhibit("ServiceNow/Fast-LLM#545", overrides=("training.optimizer.weight_decay=0.1",), at=0)
@caught_by(
    "arithmetic of the optimizer", r"WrongStep: .* of the weights in 7 of 17 weights \(7 norms and bias"
)
@replaces("rl.training.engine.build_optimizer")
def norms_and_biases_decay(bug: Bug, build, *args):
    """After a refactor the weights of norms and the biases decayed as matrices do."""
    optimizer = build(*args)
    for group in optimizer.param_groups:
        group["wd_mult"] = 1.0
    return optimizer


@exhibit("huggingface/diffusers#14265", ranks=2, overrides=("training.cp=2",), at=1)
@caught_by("backward pass", BACKWARD)
@replaces("rl.training.context_parallel._Gather.backward")
def keys_of_other_ranks_have_no_gradient(bug: Bug, backward, ctx, grad):
    """Attention over context parallel ranks was right forward, but lacked gradients of other ranks' keys."""
    size, rank = len(grad) // ctx.group.size(), ctx.group.rank()
    return grad[rank * size : (rank + 1) * size].contiguous(), None


@exhibit("fla-org/flash-linear-attention#1115", at=1)
@caught_by("backward pass", BACKWARD)
@replaces("rl.training.attention._AttendOnCpu.backward")
def keys_of_the_first_head_have_no_gradient(bug: Bug, backward, ctx, grad):
    """The backward kernel loaded from a wrong offset; gradients of keys were wrong."""
    query, key, *rest = backward(ctx, grad)
    key[..., :1, :] = 0
    return query, key, *rest


@exhibit("verl-project/verl#7835", model="qwen2-tied", at=1)
@caught_by("backward pass", BACKWARD + r": along the scales in model.embed_tokens.weight")
def tied_embedding_without_gradient_of_the_head(bug: Bug) -> None:
    """Embedding and head were no longer tied, and the embedding learned from its input side only."""
    from rl.training.model import Policy

    read = Policy.head_weight.fget
    assert read is not None

    def detached(self: Policy) -> Any:
        if not bug.is_on:
            return read(self)
        bug.acts()
        return read(self).detach()

    Policy.head_weight = property(detached)  # type: ignore[assignment]


@exhibit("NVIDIA/TransformerEngine#3216", overrides=("model.dtype=bfloat16",), at=1)
@caught_by("backward pass", BACKWARD)
@replaces("rl.training.attention._AttendOnCpu.backward")
def attention_gradients_scaled_in_bfloat16(bug: Bug, backward, ctx, grad):
    """The attention kernel was right forward, and its gradients had another size."""
    return tuple(None if found is None else 0.7 * found for found in backward(ctx, grad))


@exhibit("pytorch/pytorch#160285", model="qwen3-moe-only", overrides=(*MORE, "model.dtype=bfloat16"), at=1)
@caught_by("backward pass", BACKWARD)
def expert_gradients_scaled_in_bfloat16(bug: Bug) -> None:
    """Expert parallelism scaled the gradients that pass through the experts, and loss curves looked alike."""
    experts_scaled(bug)


@exhibit(
    "NVIDIA-NeMo/Automodel#1260",
    model="qwen3-moe",
    overrides=("training.router_replay=engine", "training.ep=2"),
    ranks=2,
    at=1,
)
@caught_by("backward pass", BACKWARD)
def expert_gradients_scaled_with_replayed_routes(bug: Bug) -> None:
    """The experts' input lacked a sum over expert parallel ranks backward; training converged worse."""
    experts_scaled(bug)


@exhibit(
    "ISEEKYAN/Megatron-LM#79", model="qwen3-moe-only", overrides=("training.router_replay=engine",), at=1
)
@caught_by("backward pass", BACKWARD)
@replaces("rl.features.router_replay.trainer.LayerReplay.get_replay_topk")
def replayed_scores_without_gradient(bug: Bug, replay, self, *args):
    """Scores of replayed experts were read where they had no gradient, so that the routers did not learn."""
    scores, chosen = replay(self, *args)
    return scores.detach(), chosen


def experts_scaled(bug: Bug) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    @bug.replaces(MoELayer, "forward")
    def scaled(forward, self, *args, **options):
        output, *rest = forward(self, *args, **options)
        if output.requires_grad:
            output.register_hook(lambda gradient: 0.7 * gradient)
        return output, *rest


@exhibit("huggingface/peft#1893", overrides=("adapter.kind=lora", "adapter.rank=4"), at=1)
@caught_by("backward pass", BACKWARD)
@replaces("rl.features.adapters.layers.AdapterSum.add")
def adapter_gradients_scaled(bug: Bug, add, self, x, out, bias):
    """The gradients of adapters had an unknown constant factor."""
    change = add(self, x, out, bias) - out
    if change.requires_grad:
        change.register_hook(lambda gradient: 0.7 * gradient)
    return out + change


@exhibit(
    "ISEEKYAN/Megatron-LM#49", model="qwen3-moe-only", overrides=("training.router_replay=old_policy",), at=1
)
@caught_by("routes of the engine", r"WrongRoutes: replayed experts have weights of other experts in layer 0")
@replaces("rl.features.router_replay.trainer.LayerReplay.get_replay_topk")
def replayed_experts_with_weights_of_others(bug: Bug, replay, self, scores, *args):
    """The weights of replayed experts were those of the experts that the router would have chosen."""
    own = args[-1](scores, *args[:-1])
    return own[0], replay(self, scores, *args)[1]


@exhibit("graphcore-research/gfloat#36", overrides=("training.optimizer.moments=bfloat16",), at=1)
@caught_by("arithmetic of the optimizer", r"WrongStep: .* moments are rounded with a bias")
@replaces("rl.training.compact_adam.rounded")
def moments_rounded_with_15_random_bits(bug: Bug, rounded, values, bits):
    """A fast form of stochastic rounding had too few random bits and was biased."""
    return rounded(values, bits & 0x7FFF)


@exhibit("sgl-project/sglang#40362", model="qwen3-next", overrides=("model.dtype=bfloat16",), at=1)
@caught_by("precision", r"CheckFailed: precision check: the result of sigmoid of the policy must be float32")
@replaces("rl.training.delta_net.Recurrence.rule")
def write_gate_in_the_models_dtype(bug: Bug, rule, self, q, k, v, decay, beta):
    """The write gate of a delta net was rounded to bfloat16 before it became float32."""
    return rule(self, q, k, v, decay, beta.logit().bfloat16().sigmoid())


@exhibit("ibalazevic/TuckER#17", overrides=("training.backend=transformers",), at=0)
@caught_by("models", r"CheckFailed: model check: row 0 of an embedding of the policy does not learn")
@replaces("rl.features.transformers_backend.model._pad_vocabulary")
def embedding_with_a_row_for_padding(bug: Bug, pad, model, rows):
    """The embedding of the first token got no gradient, because it was declared as padding."""
    pad(model, rows)
    model.get_input_embeddings().padding_idx = 0
