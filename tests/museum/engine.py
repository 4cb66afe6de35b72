"""Exhibits: engine and trainer hold the same weights and compute different log-probs."""

from tests.museum.museum import Bug, exhibit

GAP = "log-probs of engine and trainer"
DIFFER = r"LogprobMismatch: the engine's log-probs differ .*rank \d"


def after_building(bug: Bug, change) -> None:
    """Call `change` with the engine's model once it is built."""
    from rl.rollout.engine import RolloutEngine

    build = RolloutEngine.__init__

    def built(self, *args, **options):
        build(self, *args, **options)
        bug.acts()
        change(self.model)

    RolloutEngine.__init__ = built


@exhibit(
    name="wrong rotary base in the engine",
    peer="NVIDIA-NeMo/RL#2981",
    saw="The engine's rotary embedding was wrong for later positions; its log-probs collapsed to 0.",
    caught_by=GAP,
    expects=DIFFER,
    at=0,
)
def wrong_base(bug: Bug) -> None:
    def change(model):
        for module in model.modules():
            if hasattr(module, "cos_sin_cache"):
                module.base = module.base * 4
                module.cos_sin_cache.copy_(module._compute_cos_sin_cache())

    after_building(bug, change)


@exhibit(
    name="rotary scaling ignored",
    peer="NVIDIA/Megatron-LM#6305",
    saw="The factor of the rotary scaling was parsed and never reached the model.",
    caught_by=GAP,
    expects=DIFFER,
    model="llama",
    at=0,
)
def scaling_ignored(bug: Bug) -> None:
    from rl.training import model

    @bug.replaces(model, "scaled_frequencies")
    def none(scaled_frequencies, hf):
        return None


@exhibit(
    name="wrong epsilon of the norm",
    peer="NVIDIA-NeMo/Megatron-Bridge#5712",
    saw="Some norms ran with the default epsilon of 1e-5 instead of the config's 1e-6.",
    caught_by=GAP,
    expects=DIFFER,
    at=0,
)
def wrong_epsilon(bug: Bug) -> None:
    def change(model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5

    after_building(bug, change)


@exhibit(
    name="head of the engine not tied",
    peer="vllm-project/vllm#5621",
    saw="With tie_word_embeddings the head kept other weights than the embedding.",
    caught_by=GAP,
    expects=DIFFER,
    model="qwen2-tied",
)
def head_not_tied(bug: Bug) -> None:
    from rl.engines import memory

    copied: list = []

    @bug.replaces(memory, "refit")
    def with_own_head(refit, trainer, engine, **options):
        import copy

        if not copied:
            copied.append(copy.deepcopy(engine.model.lm_head))
            engine.model.lm_head = copied[0]
        return refit(trainer, engine, **options)


@exhibit(
    name="weights changed after the wake-up",
    peer="verl-project/verl#7904",
    saw="Sleep and wake-up left other weights than those synchronised, and the text was garbled.",
    caught_by=GAP,
    expects=DIFFER,
)
def changed_on_waking(bug: Bug) -> None:
    from rl.rollout.engine import RolloutEngine

    @bug.replaces(RolloutEngine, "wake_cache")
    def wake(wake_cache, self):
        wake_cache(self)
        self.weights()["model.norm.weight"].detach().mul_(1.01)


@exhibit(
    name="temperature not applied by the trainer",
    peer="huggingface/trl#3029",
    saw="Log-probs ignored the sampling temperature, which biased the policy gradient.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=("rollout.temperature=0.7",),
)
def no_temperature(bug: Bug) -> None:
    from rl.training.model import Packed

    @bug.replaces(Packed, "run")
    def at_one(run, self, micro, temperature):
        return run(self, micro, 1.0)


@exhibit(
    name="prefix cache of old weights",
    peer="NVIDIA-NeMo/RL#4018",
    saw="Prefixes stayed cached over weight updates, and the mismatch grew until a restart.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=("data.train=[TOY/long.parquet]", "data.max_prompt_tokens=160"),
)
def old_cache(bug: Bug) -> None:
    from rl.rollout.engine import RolloutEngine

    original = RolloutEngine.__init__

    def without_reset(self, *args, **options):
        original(self, *args, **options)
        reset = self.llm.reset_prefix_cache

        def pretend(*args, **options):
            if not bug.is_on:
                return reset(*args, **options)
            bug.acts()
            return True

        self.llm.reset_prefix_cache = pretend

    RolloutEngine.__init__ = without_reset


@exhibit(
    name="labels shifted by one",
    peer="NVIDIA/Megatron-LM#5682",
    saw="A packing path did not shift the labels; the first loss was 24 instead of 16.",
    caught_by=GAP,
    expects=DIFFER,
)
def shifted(bug: Bug) -> None:
    from rl.training.model import Packed

    @bug.replaces(Packed, "run")
    def one_later(run, self, micro, temperature):
        from dataclasses import replace

        return run(self, replace(micro, targets=micro.targets.roll(-1)), temperature)


@exhibit(
    name="attention across packed samples",
    peer="huggingface/transformers#46634",
    saw="A mask of ones switched the detection of packed samples off; the loss still fell.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=("training.shared_prefix=false",),
)
def leak(bug: Bug) -> None:
    from rl.training import packing

    @bug.replaces(packing, "row_attention")
    def of_one_sequence(row_attention, groups, keys, device):
        from rl.training.rows import Group

        return row_attention([Group(0, groups[-1].end)], keys, device)


@exhibit(
    name="positions not restarted in a row",
    peer="hiyouga/LlamaFactory#7318",
    saw="With packing the positions of later samples continued those of earlier ones.",
    caught_by=GAP,
    expects=DIFFER,
)
def positions_continue(bug: Bug) -> None:
    from rl.training import packing

    @bug.replaces(packing, "positions")
    def of_row(positions, groups):
        import numpy as np

        return np.arange(groups[-1].end)


@exhibit(
    name="dropout in the log-prob pass",
    peer="huggingface/trl#3234",
    saw="Dropout made log-probs irreproducible, so that first ratios were not 1.",
    caught_by=GAP,
    expects=DIFFER,
)
def dropout(bug: Bug) -> None:
    from rl.training.model import Packed

    @bug.replaces(Packed, "run")
    def with_dropout(run, self, micro, temperature):
        import torch

        dropout = self.embedding.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1)
        )
        try:
            return run(self, micro, temperature)
        finally:
            dropout.remove()


@exhibit(
    name="router in another dtype",
    peer="PrimeIntellect-ai/prime-rl#2952",
    saw="Trainer and engine computed the router in different precision and chose other experts.",
    caught_by=GAP,
    expects=DIFFER,
    model="qwen3-moe",
)
def router_dtype(bug: Bug) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    @bug.replaces(TopKRouter, "gating")
    def in_bfloat16(gating, self, hidden):
        return gating(self, hidden.bfloat16().to(hidden))


@exhibit(
    name="other seeds on the ranks of a replica",
    peer="vllm-project/vllm#15895",
    saw="With external_launcher the ranks of an engine sampled different tokens.",
    caught_by="event log of a replica",
    expects=r"Disagreement: ranks disagree on the event log .*rank 1 generated other tokens",
    ranks=2,
    overrides=("rollout.tp=2", "rollout.max_response_tokens=1"),
)
def other_seeds(bug: Bug) -> None:
    from rl.rollout import calls

    @bug.replaces(calls, "call_of")
    def shifted_seed(call_of, *args):
        found = call_of(*args)
        found.params.extra_args["seed"] += bug.rank
        return found


@exhibit(
    name="tokens labelled with an older version",
    peer="huggingface/trl#5932",
    saw="The staleness filter trusted a version label that did not match the weights of the engine.",
    caught_by="staleness",
    expects=r"StaleTokens: .* tokens have a staleness outside of 0 to 0",
)
def wrong_label(bug: Bug) -> None:
    from rl.rollout.calls import Live

    @bug.replaces(Live, "versions")
    def older(versions, self, num_tokens):
        return versions(self, num_tokens) - 1


@exhibit(
    name="trainer ignores the truncation",
    peer="huggingface/trl#6789",
    saw="With top_p every importance ratio was multiplied by the probability of the tokens that were kept.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=("rollout.top_p=0.9",),
)
def ignored(bug: Bug) -> None:
    from rl.training import sampling_masks

    @bug.replaces(sampling_masks, "masks_of")
    def whole(masks_of, batch, samples):
        return None
