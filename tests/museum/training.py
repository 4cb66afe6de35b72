"""Exhibits: updates, gradients and the reference policy."""

from tests.museum.museum import Bug, exhibit

COUNT = "counted tokens"
REDUCTION = "probe of the reduced gradient"


@exhibit(
    name="gradients not reduced",
    peer="NVIDIA/Megatron-LM#1685",
    saw="The example's loop left out finalize_model_grads, so every rank trained on its own samples.",
    caught_by=REDUCTION,
    expects=r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once",
    ranks=2,
)
def not_reduced(bug: Bug) -> None:
    from rl.training import gradients

    @bug.replaces(gradients, "finalize_model_grads")
    def nothing(finalize, *args, **options):
        pass


@exhibit(
    name="gradients reduced twice",
    peer="NVIDIA/Megatron-LM#775",
    saw="The reduction ran at the end of the backward pass and again at the end of the step.",
    caught_by=REDUCTION,
    expects=r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once",
    ranks=2,
)
def reduced_twice(bug: Bug) -> None:
    from rl.training import gradients

    @bug.replaces(gradients, "finalize_model_grads")
    def again(finalize, model, *args, **options):
        finalize(model, *args, **options)
        finalize(model, *args, **options)


@exhibit(
    name="gradients divided by the replicas",
    peer="NVIDIA/Megatron-LM#5956",
    saw="Gradients were divided by a parallel size although the loss had its global denominator.",
    caught_by=REDUCTION,
    expects=r"rank \d.*WrongReduction: the gradients of .* it was not summed exactly once",
    ranks=2,
)
def divided(bug: Bug) -> None:
    from rl.training import gradients

    @bug.replaces(gradients, "finalize_model_grads")
    def mean(finalize, models, *args, **options):
        finalize(models, *args, **options)
        for model in models:
            model.scale_gradients(0.5)


@exhibit(
    name="denominators of each rank",
    peer="modelscope/ms-swift#10165",
    saw="Each rank divided by its own number of tokens, so short responses counted more.",
    caught_by=COUNT,
    expects=r"WrongTokens: an update counted .* rank 1 counted .* divided by",
    ranks=2,
)
def own_denominators(bug: Bug) -> None:
    from rl.phases.minibatches import MinibatchPlan

    @bug.replaces(MinibatchPlan, "totals")
    def of_rank(totals, self, batch):
        from dataclasses import replace

        own = sorted(i for micro in self.micro_batches[bug.rank] for i in micro)
        return replace(totals(self, batch), num_tokens=float(batch.mask[batch.tokens_of(own)].sum()))


@exhibit(
    name="micro-batch dropped",
    peer="NVIDIA-NeMo/labs-molt#113",
    saw="Samples after the last complete accumulation window were dropped.",
    caught_by=COUNT,
    expects=r"WrongTokens: an update counted .* rank 0 counted",
    overrides=("training.micro_batch_tokens=40",),
)
def dropped(bug: Bug) -> None:
    from rl.training.engine import TrainingEngine

    @bug.replaces(TrainingEngine, "update")
    def all_but_one(update, self, batch, plan, loss, **options):
        return update(self, batch, [rank[:-1] for rank in plan], loss, **options)


@exhibit(
    name="gradient that is not a number skipped",
    peer="verl-project/verl#1506",
    saw="An update with a gradient norm of nan is skipped with a printed warning.",
    caught_by="finite gradient norm",
    expects=r"FloatingPointError: the gradient norm is nan; .* on rank 1",
    ranks=2,
)
def not_a_number(bug: Bug) -> None:
    from rl.phases import policy_gradient

    @bug.replaces(policy_gradient, "aggregate")
    def nan_on_rank_1(aggregate, losses, *args, **options):
        return aggregate(losses * (float("nan") if bug.rank == 1 else 1.0), *args, **options)


@exhibit(
    name="reference is the trained model",
    peer="NVIDIA-NeMo/RL#3722",
    saw="The KL divergence was measured from weights that moved with the policy.",
    caught_by="sample of the reference weights",
    expects=r"the reference weights of rank 0 have changed",
    overrides=("objective.kl_coef=0.01",),
)
def reference_is_policy(bug: Bug) -> None:
    from rl.training.engine import TrainingEngine

    @bug.replaces(TrainingEngine, "reference_weights")
    def of_policy(reference_weights, self):
        self.reference.weights = [parameter.detach() for parameter in self.model.parameters()]
        return reference_weights(self)


@exhibit(
    name="dropout in the reference pass",
    peer="huggingface/trl#2042",
    saw="With dropout the log-probs fluctuated against those of the reference.",
    caught_by="policy equals reference at the start",
    expects=r"LogprobMismatch: before the first update the log-probs of policy and reference differ",
    overrides=("objective.kl_coef=0.01",),
    at=1,
)
def dropout(bug: Bug) -> None:
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


@exhibit(
    name="replicas of a weight drift apart",
    peer="NVIDIA/Megatron-LM#6920",
    saw="After a load the ranks' copies were not synchronised, without an error.",
    caught_by="replicas of the weights",
    expects=r"Disagreement: .*final_layernorm.weight of the policy on rank \d differ",
    ranks=2,
    overrides=("agreement.weights_every=1",),
)
def drifting(bug: Bug) -> None:
    from rl.checks.checks import Checks

    @bug.replaces(Checks, "_weights")
    def after_a_change(check, self, name, model):
        if bug.rank == 1:
            model.model.decoder.final_layernorm.weight.data.mul_(1.001)
        check(self, name, model)


@exhibit(
    name="gradients of a tied embedding not added",
    peer="NVIDIA/Megatron-LM#844",
    saw="First and last pipeline stage updated their copies of the embedding by different gradients.",
    caught_by="log-probs of engine and trainer",
    expects=r"LogprobMismatch: the engine's log-probs differ .*rank \d",
    model="qwen2-tied",
    ranks=2,
    overrides=("training.pp=2",),
    at=1,
)
def untied_gradients(bug: Bug) -> None:
    import sys

    from megatron.core.distributed import finalize_model_grads

    module = sys.modules[finalize_model_grads.__module__]

    @bug.replaces(module, "_allreduce_word_embedding_grads")
    def nothing(allreduce, *args, **options):
        pass
