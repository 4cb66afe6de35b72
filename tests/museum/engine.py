"""Exhibits: engine and trainer hold the same weights and compute different log-probs."""

from tests.museum.museum import Bug, caught_by, exhibit, replaces

GAP = "log-probs of engine and trainer"
HALF = "model.dtype=bfloat16"
DIFFER = r"LogprobMismatch: the engine's log-probs differ .*rank \d.*The weights are equal \(all \d+ elements"


def after_building(bug: Bug, change) -> None:
    """Call `change` with the engine's model once it is built."""
    from rl.rollout.engine import RolloutEngine

    build = RolloutEngine.__init__

    def built(self, *args, **options):
        build(self, *args, **options)
        bug.acts()
        change(self.model)

    RolloutEngine.__init__ = built


@exhibit("NVIDIA-NeMo/RL#2981", at=0)
@caught_by(GAP, DIFFER)
def wrong_rotary_base_in_the_engine(bug: Bug) -> None:
    """The engine's rotary embedding was wrong for later positions; its log-probs collapsed to 0."""

    def change(model):
        for module in model.modules():
            if hasattr(module, "cos_sin_cache"):
                module.base = module.base * 4
                module.cos_sin_cache.copy_(module._compute_cos_sin_cache())

    after_building(bug, change)


@exhibit("NVIDIA/Megatron-LM#6305", model="llama", overrides=(HALF,), at=0)
@caught_by("function of the files", r"LogprobMismatch: start check: transformers computes log-probs from the")
@replaces("rl.models.rope._llama3")
def rotary_scaling_ignored(bug: Bug, _llama3, plain, rope):
    """The factor of the rotary scaling was parsed and never reached the model."""
    return plain


@exhibit("NVIDIA-NeMo/Megatron-Bridge#5712", at=0)
@caught_by(GAP, DIFFER)
def wrong_epsilon_of_the_norm(bug: Bug) -> None:
    """Some norms ran with the default epsilon of 1e-5 instead of the config's 1e-6."""

    def change(model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5

    after_building(bug, change)


@exhibit("vllm-project/vllm#5621", model="qwen2-tied")
@caught_by(GAP, DIFFER)
def head_of_the_engine_not_tied(bug: Bug) -> None:
    """With tie_word_embeddings the head kept other weights than the embedding."""
    from rl.engines import memory

    copied: list = []

    @bug.replaces(memory, "refit")
    def with_own_head(refit, trainer, engine, **options):
        import copy

        if not copied:
            copied.append(copy.deepcopy(engine.model.lm_head))
            engine.model.lm_head = copied[0]
        return refit(trainer, engine, **options)


@exhibit("verl-project/verl#7904")
@caught_by(GAP, DIFFER)
@replaces("rl.rollout.engine.RolloutEngine.wake_cache")
def weights_changed_after_the_wake_up(bug: Bug, wake_cache, self):
    """Sleep and wake-up left other weights than the synchronised ones, and the text was garbled."""
    wake_cache(self)
    self.weights()["model.norm.weight"].detach().mul_(1.01)


@exhibit("huggingface/trl#3029", overrides=("rollout.temperature=0.7",))
@caught_by(GAP, DIFFER)
@replaces("rl.training.model.Packed.run")
def temperature_not_applied_by_the_trainer(bug: Bug, run, self, micro, temperature):
    """Log-probs ignored the sampling temperature, which biased the policy gradient."""
    return run(self, micro, 1.0)


@exhibit("NVIDIA-NeMo/RL#4018", overrides=("data.train=[TOY/long.parquet]", "data.max_prompt_tokens=160"))
@caught_by(GAP, DIFFER)
def prefix_cache_of_old_weights(bug: Bug) -> None:
    """Prefixes stayed cached over weight updates, and the mismatch grew until a restart."""
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


@exhibit("NVIDIA/Megatron-LM#5682")
@caught_by(GAP, DIFFER)
@replaces("rl.training.model.Packed.run")
def labels_shifted_by_one(bug: Bug, run, self, micro, temperature):
    """A packing path did not shift the labels; the first loss was 24 instead of 16."""
    from dataclasses import replace

    return run(self, replace(micro, targets=micro.targets.roll(-1)), temperature)


@exhibit("huggingface/transformers#46634", overrides=("training.shared_prefix=false",))
@caught_by(GAP, r"LogprobMismatch: .* In a pass with each sample alone")
@replaces("rl.training.packing.row_attention")
def attention_across_packed_samples(bug: Bug, row_attention, groups, keys, device):
    """A mask of ones switched the detection of packed samples off; the loss still fell."""
    from rl.training.rows import RowGroup

    return row_attention([RowGroup(0, groups[-1].end)], keys, device)


@exhibit("hiyouga/LlamaFactory#7318")
@caught_by(GAP, DIFFER)
@replaces("rl.training.packing.positions")
def positions_not_restarted_in_a_row(bug: Bug, positions, groups):
    """With packing the positions of a later sample continued the positions of the sample before it."""
    import numpy as np

    return np.arange(groups[-1].end)


@exhibit("huggingface/trl#3234")
@caught_by(GAP, r"LogprobMismatch: .* a pass is random \(dropout\)")
@replaces("rl.training.model.Packed.run")
def dropout_in_the_log_prob_pass(bug: Bug, run, self, micro, temperature):
    """Dropout made log-probs irreproducible, so that first ratios were not 1."""
    import torch

    dropout = self.embedding.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1)
    )
    try:
        return run(self, micro, temperature)
    finally:
        dropout.remove()


@exhibit("PrimeIntellect-ai/prime-rl#2952", model="qwen3-moe")
@caught_by(GAP, DIFFER)
@replaces("megatron.core.transformer.moe.router.TopKRouter.gating")
def router_in_another_dtype(bug: Bug, gating, self, hidden):
    """Trainer and engine computed the router in different precision and chose other experts."""
    return gating(self, hidden.bfloat16().to(hidden))


@exhibit("vllm-project/vllm#14027", model="qwen3-moe", overrides=(HALF,), at=0)
@caught_by("precision", r"CoarseRouter: precision check: the scores of the routers of the engine")
@replaces("rl.rollout.router.install")
def router_of_the_engine_in_bfloat16(bug: Bug, install):
    """The engine rounded the scores of its routers and chose other experts for some tokens."""


@exhibit("vllm-project/vllm#15895", ranks=2, overrides=("rollout.tp=2", "rollout.max_response_tokens=1"))
@caught_by(
    "event log of a replica", r"Disagreement: ranks disagree on the event log .*rank 1 generated other tokens"
)
@replaces("rl.rollout.calls.call_of")
def other_seeds_on_the_ranks_of_a_replica(bug: Bug, call_of, *args):
    """With external_launcher the ranks of an engine sampled different tokens."""
    found = call_of(*args)
    found.params.extra_args["seed"] += bug.rank
    return found


@exhibit("huggingface/trl#5932")
@caught_by(
    "staleness", r"SamplesDiffer: sample check: token 0 of a request has the version 0 .* version 1 sampled"
)
@replaces("rl.rollout.calls.Live.versions")
def tokens_labelled_with_an_older_version(bug: Bug, versions, self, num_tokens):
    """The staleness filter trusted a version label that did not match the weights of the engine."""
    return versions(self, num_tokens) - 1


@exhibit("huggingface/trl#6789", overrides=("rollout.top_p=0.9",))
@caught_by(GAP, DIFFER)
@replaces("rl.features.sampling_masks.trainer.masks_of")
def trainer_ignores_the_truncation(bug: Bug, masks_of, batch, samples):
    """With top_p every importance ratio was multiplied by the probability of the tokens that were kept."""
    return None


@exhibit("NVIDIA-NeMo/RL#3497", ranks=2, overrides=(HALF,))
@caught_by("sampling parameters", r"CheckFailed: sampling check: .* with other parameters")
@replaces("rl.rollout.calls.call_of")
def penalty_on_one_rank(bug: Bug, call_of, *args):
    """The repetition penalty of a checkpoint's generation_config applied in the engine only. Here it does on
    one of two ranks."""
    found = call_of(*args)
    found.params.repetition_penalty = 1.0 + 0.5 * bug.rank
    return found


@exhibit("NovaSky-AI/SkyRL#1908", model="qwen3-moe", overrides=(HALF, "training.router_replay=engine"), at=1)
@caught_by(
    "routes of the engine",
    r"WrongRoutes: the present router chooses other experts for \d+% of the tokens in layer 0",
)
@replaces("rl.features.router_replay.trainer.RouterReplay._given")
def routes_of_the_token_before(bug: Bug, given, self, batch, row):
    """The routes were shifted by one token, which the bound of bfloat16 hides."""
    routes = given(self, batch, row)
    routes.experts = routes.experts.roll(1, dims=1)
    return routes


@exhibit(
    "radixark/miles#3229", model="qwen3-moe-only", overrides=(HALF, "training.router_replay=engine"), at=1
)
@caught_by("routes of the engine", r"WrongRoutes: .* in layer 1 of those .*: the routes of 1 of \d layers")
@replaces("rl.features.router_replay.trainer.RouterReplay._given")
def routes_of_the_token_before_in_one_layer(bug: Bug, given, self, batch, row):
    """Only the last layer's routes were shifted by one token."""
    routes = given(self, batch, row)
    routes.experts[-1] = routes.experts[-1].roll(1, dims=0)
    return routes


@exhibit("vllm-project/vllm#13196", overrides=("rollout.draft.path=POLICY",), at=0)
@caught_by("distribution with drafts", r"WrongDistribution: draft check: .*chi-square")
@replaces("rl.rollout.cpu_drafts.DraftedSampler._rows")
def one_random_number_for_all_drafts(bug: Bug, rows_of, self):
    """Drafts and the tokens after them were sampled with the same random number, in wrong proportions."""
    import numpy as np

    names, positions = rows_of(self)
    if self.counts is not None:
        positions = np.repeat(positions[np.cumsum(self.counts) - self.counts], self.counts)
    return names, positions
