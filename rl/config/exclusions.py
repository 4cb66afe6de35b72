"""The table of features that exclude each other, each pair with its reason and its remedy.

EXCLUSIONS is written in the names of `rl.config.features`. Refusals, the table on the page of keys, and
tests/unit/config/test_exclusions.py follow from it. A pair that is not in the table is accepted, unless the
values themselves are wrong (`rl.config.checks`) or do not fit the model and the layout
(`rl.config.layout_checks`, `rl.config.adapter_checks`).
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass

from rl.config.features import MAX_RANK, is_on, requirement, setting
from rl.config.options import ConfigError
from rl.config.schema import Config

MERGED = "use adapter.in_engine=merged"
JOB_ARRAY = "leave it out, or sweep with a job array"
MODEL_BASE = "use adapter.base=model"
WHOLE_DISTRIBUTION = (
    "sample from the whole distribution (rollout.top_p=1, top_k=0, min_p=0), or accept biased ratios by "
    "rollout.biased_truncation=true"
)
NO_IMAGES = "leave out data.image_key, or use text only"
OLDER = "other losses do not correct for tokens of older weights"
CORRECT = "set rollout_correction.truncate_tokens=2, or another weight, or rollout_correction.bypass=true"


PLAIN_LORA = "use adapter.kind=lora and adapter.init=zero"
MEGATRON = "use an architecture of docs/models.md with training.backend=megatron"


EXCLUSIONS = {
    "a class of transformers": {
        "training.tp": "the class computes whole layers; use training.tp=1",
        "training.pp": "the class computes whole models; use training.pp=1",
        "training.cp": "the class computes whole rows; use training.cp=1",
        "training.ep, training.etp": "the class computes whole layers; use training.ep=1 and training.etp=0",
        "training.vpp": "there are no pipeline stages; use training.vpp=1",
        "training.recompute=selective, training.recompute_every": (
            "the class recomputes whole layers, all of them; use training.recompute=full"
        ),
        "adapter.kind=dora, adapter.init=pissa": f"it reads whole rows of every weight; {PLAIN_LORA}",
        "adapter.base=fp8": f"only Megatron's layers are dequantised; {MODEL_BASE}",
        "adapters in the engine": f"only merged values are gathered from the ranks of a copy; {MERGED}",
        "critic.share_base": "each class gathers weights of its own; leave out critic.share_base",
        "roles": (
            "what vLLM's loader changes cannot be compared with a trainer on other ranks; leave out the "
            "section roles"
        ),
        "training.router_replay": f"experts are replayed in Megatron's routers; {MEGATRON}",
        "a prediction head": f"the head is built from Megatron's layers; {MEGATRON}",
        "model.numerics=bitwise": f"the bitwise layers replace Megatron's; {MEGATRON}",
        "data.image_key": f"only towers beside Megatron's layers read images; {MEGATRON}",
        "rollout.quantization=fp8": (
            "only weights of known layouts are quantised; use rollout.quantization=none"
        ),
        "scaled rotation": "the class reads config.json; scale the rotation there, in a copy of the model",
    },
    "not a class of transformers": {
        "training.shard": "Megatron's layers are split by training.tp, pp and ep; leave out training.shard"
    },
    "data.curriculum": {
        "data.train_weights": "a curriculum orders the prompts of all files; set one of the two"
    },
    "data.messages_key": {
        "not sft": (
            "no other algorithm reads conversations; leave it out: prompts of several turns, and pairs of "
            "conversations, are read without it"
        ),
        "data.overlong_prompts=truncate_left": (
            "that would cut the beginning of a conversation; use truncate_right, drop or error"
        ),
        "held-out responses": (
            "a conversation has no answer to score; set validation.greedy=false, "
            "validation.samples_per_prompt=0 and validation.loss=true"
        ),
    },
    "data.image_key": {
        "data.overlong_prompts=truncate_left": "that would cut images in two; use drop or error",
        "data.messages_key": (
            "conversations are read without images; use prompts with a response (data.response_key)"
        ),
        "whole responses, needs critic, reward.model.path": (
            "images are read only by a policy that learns from its own samples or by sft, and by its "
            f"teachers; {NO_IMAGES}"
        ),
        "teacher.self_taught=present|initial, teacher.student_share": (
            f"teachers read images only in the policy's own samples; {NO_IMAGES}"
        ),
        "agents.on_rewrite=new_row": (
            "a rewritten conversation would lose its images; use agents.on_rewrite=refuse"
        ),
        "roles, rollout.carry_over, a sweep": f"pixels do not travel with its samples; {NO_IMAGES}",
        "run.mode=train_only": f"stored samples have no pixels; {NO_IMAGES}",
        "training.cp": (
            "its ranks divide the tokens of a row before the images are merged into it; use training.cp=1, "
            "and for long rows training.tp and training.recompute=full"
        ),
        "training.vpp": "chunks of the first stage would wait for its images; use training.vpp=1",
        "model.numerics=bitwise": "the tower has other kernels in the engine; use model.numerics=fast",
    },
    "model.vision=train": {
        "adapters": "the files of an adapter have no weights of the tower; use model.vision=frozen"
    },
    "not data.messages_key": {
        "data.train_on, data.overlong_prompts=truncate_right": (
            "that is for conversations; set data.messages_key, or leave it out"
        )
    },
    "a held-out loss": {
        "not responses in the data": "the loss is that of responses in the data; leave out validation.loss"
    },
    "run.mode=train|check|evaluate|rollout_only": {
        "run.rollouts": "this mode reads no stored samples; use score_only or train_only, or leave it out"
    },
    "run.mode=rollout_only|score_only|train_only": {
        "not samples, learning from the data": (
            "this mode replays responses of the policy; use another algorithm, or run.mode=train"
        ),
        "roles, rollout.carry_over": "samples are stored and replayed step by step; leave it out",
    },
    "run.mode=rollout_only": {
        "logging.rollouts=none|sample": "this mode generates in order to store; set logging.rollouts=all"
    },
    "run.mode=score_only": {
        "agents": "this mode calls only the reward function, but environments give scores too; leave it out",
        "not scored samples": "the stored samples have no scores; leave it out",
    },
    "rollout.carry_over": {
        "not samples": "it carries over samples to learn from; leave out rollout.carry_over",
        "not a loss of older tokens": f"{OLDER}; use algorithm=grpo, dapo, rloo or ppo",
        "greedy baselines": (
            "samples have tokens of older weights, but the greedy response has none; use algorithm=rloo"
        ),
        "not a correction": f"tokens of older weights need a correction; {CORRECT}",
        "rollout.stop": (
            "a stop string could begin in one step and end in the next; use rollout.stop_token_ids"
        ),
    },
    "rollout.carry_over_cache=keep": {
        "rollout.deterministic": (
            "a resumed run computes the cache again and gets other values; use carry_over_cache=recompute"
        )
    },
    "roles": {
        "not samples": "generators produce samples to learn from; leave out the section roles",
        "rollout.carry_over": (
            "generators go on with unfinished samples by themselves with roles.granularity=turn, group or "
            "sample; use one of these, and leave out rollout.carry_over"
        ),
        "rollout.longest_first": (
            "generators begin groups in one fixed order, without the end of a step; leave out one of the two"
        ),
    },
    "lag": {
        "greedy baselines": (
            "the engine no longer holds the weights that sampled, which must give the greedy response; use "
            "roles.lag=0"
        ),
        "samples beside responses": (
            "it compares with the policy that sampled, which the trainers no longer hold; use roles.lag=0"
        ),
        "not a loss of older tokens": f"{OLDER}; use roles.lag=0",
        "not a correction": f"tokens of older weights need a correction; {CORRECT}",
    },
    "no lag": {
        "roles.granularity=turn|group|sample": (
            "no sample is in progress when new weights come; use roles.lag=1 or more, or "
            "roles.granularity=batch"
        )
    },
    "rollout.dp_attention": {
        "roles": "a replica that takes weights would stop those with its experts; leave out one of both",
        "agents": (
            "a replica that waits for environments would stop those with its experts; leave out one of both"
        ),
        "adapters in the engine": f"dummy steps have no adapter; {MERGED}",
        "reward.judge.path": "a second engine would have other groups of ranks; use rollout.ep=1",
    },
    "rollout.kv_offload_gib": {
        "training.router_replay=engine": (
            "the experts of offloaded tokens would be lost; use training.router_replay=old_policy"
        ),
        "reward.judge.path": "vLLM has one such cache per process, for all engines; leave out one of both",
    },
    "drafts": {
        "roles, a sweep, agents, rollout.carry_over": (
            "drafts are checked only in turn with training, one turn per sample; leave out one of both"
        ),
        "adapters in the engine": f"the draft model has no adapter; {MERGED}",
        "rollout.ep, rollout.dp_attention": (
            "its draft model would need the same ranks for its experts; use rollout.ep=1"
        ),
        "model.numerics=bitwise": "its passes are for one token per sample; use model.numerics=fast",
        "rollout.min_p": "vLLM does not apply it to drafts; use rollout.top_p",
        "rollout.stop": "tokens after the string would be accepted with it; use rollout.stop_token_ids",
        "training.router_replay=engine": (
            "experts of rejected drafts would be returned too; use training.router_replay=old_policy"
        ),
    },
    "rollout.draft.method=mtp": {
        "rollout.draft.path": "the head of model.path proposes the tokens; leave out one of the two",
        "rollout.quantization=fp8": "its refit would leave out the head; use rollout.quantization=none",
        "scaled rotation": "vLLM's head rotates as config.json says; leave it out",
    },
    "a prediction head": {
        "training.vpp": "it is built for whole pipeline stages; use training.vpp=1",
        "training.cp": "it needs the next token of every position on its rank; use training.cp=1",
        "adapters": "its layer would stay behind; leave out training.mtp.head_lr and rollout.draft.method",
        "model.numerics=bitwise": "its layer has other kernels; use model.numerics=fast",
    },
    "training.mtp.head_lr": {
        "training.shared_prefix=true": (
            "its state at the last token of a prompt depends on the response's first token; set "
            "training.shared_prefix=false"
        )
    },
    "rollout.quantization=fp8": {
        "model.dtype=float32": "vLLM computes layers in FP8 beside bfloat16; set model.dtype=bfloat16",
        "model.numerics=bitwise": "the engine would have other weights than the trainer; use none",
        "adapters in the engine": f"a refit would not reach the layers below the adapters; {MERGED}",
        "roles": "weights travel over the link into the tensors that the engine computes with; use none",
    },
    "refit.changed_only": {
        "not roles": (
            "ranks that train and generate receive over the links of one grid; leave out refit.changed_only"
        )
    },
    "roles.min_replicas": {
        "not roles": (
            "without generators every rank trains, and a run needs all that train; leave out "
            "roles.min_replicas"
        ),
        "rollout.deterministic": "it assigns groups to replicas by a fixed rule; set one of the two",
    },
    "sampling masks": {
        "run.mode=train_only": (
            "its samples come without the sets of tokens that were kept, over which the trainer "
            f"renormalises; {WHOLE_DISTRIBUTION}"
        ),
        "learning from the data": f"its responses have no sets of kept tokens; {WHOLE_DISTRIBUTION}",
        "distillation": f"the teacher's distribution is over the whole vocabulary; {WHOLE_DISTRIBUTION}",
        "teacher.self_taught=present|initial": (
            f"the engine kept no tokens for the contexts of the teacher; {WHOLE_DISTRIBUTION}"
        ),
    },
    "training.router_replay": {
        "not a policy loss": "only policy gradients replay experts; leave out training.router_replay"
    },
    "recomputed experts": {
        "training.router_replay": (
            "the backward pass would replay the experts of another micro-batch; use training.recompute=full"
        )
    },
    "recomputed latents": {
        "training.cp": (
            "context parallel ranks project the latents of the whole row; use training.recompute=full"
        )
    },
    "training.router_replay=old_policy": {
        "rollout_correction.bypass": (
            "bypass leaves out the pass whose experts are replayed; use training.router_replay=engine"
        )
    },
    "training.router_replay=engine": {
        "run.mode=train_only": (
            "its samples come without the experts of their tokens; use training.router_replay=old_policy"
        )
    },
    "agents": {
        "template variables": "agents.template_kwargs has the variables of a trajectory; set it instead",
        "not generation in the whole run": "environments act on generated responses; remove the section",
        "greedy baselines, samples beside responses": (
            "each sample is compared with another response to its prompt, which an environment may fail to "
            "give; use algorithm=grpo, rloo, reinforce_pp or ppo"
        ),
        "teacher.student_share": (
            "responses of the teacher and of the data have no turns of an environment; leave it out"
        ),
    },
    "new rows": {
        "whole responses": (
            "it learns from whole responses, which new rows would split; use agents.on_rewrite=refuse"
        )
    },
    "order of arrival": {
        "rollout.deterministic": (
            "the order then depends on how long the environments take; set agents.order=waves"
        )
    },
    "adapter.path": {
        "not adapters": (
            "without one all weights learn; set adapter.kind to that of the directory, or leave it out"
        ),
        "adapter.init=pissa": "the directory holds the first A and B; leave out one of the two",
    },
    "adapter.base=fp8": {
        "adapter.kind=dora": f"dora reads the rows of every weight; {MODEL_BASE}",
        "adapter.init=pissa": f"pissa changes every weight; {MODEL_BASE}",
        "critic.share_base": f"the critic's layers would not dequantise the policy's; {MODEL_BASE}",
        "a sweep": f"points share one base in model.dtype; {MODEL_BASE}",
    },
    "adapters in the engine": {
        "adapter.kind=dora": f"vLLM does not apply its magnitudes; {MERGED}",
        "a large rank": f"vLLM's largest rank is {MAX_RANK}; {MERGED}",
    },
    "critic.share_base": {
        "not adapters": (
            "the critic shares the frozen weights of a policy with adapters; set adapter.kind=lora, or leave "
            "out critic.share_base"
        ),
        "critic.path": "the shared weights are those of model.path; leave out one of the two",
        "adapter.init=pissa": "pissa takes a part out of the shared weights; use adapter.init=zero",
    },
    "a sweep": {
        "not adapters": (
            "each point trains an adapter, and would train the base of all; set adapter.kind=lora, or sweep "
            "with a job array (lockstep sweep)"
        ),
        "merged adapters": "one engine holds the adapters of all points; set adapter.in_engine=adapter",
        "roles": f"generators take the weights of one policy; {JOB_ARRAY}",
        "rollout.carry_over": f"the end of a point's step would end the generation of all; {JOB_ARRAY}",
        "agents": f"the points' one call of the engine has no environments; {JOB_ARRAY}",
        "run.mode=check|evaluate|rollout_only|score_only|train_only": (
            f"it examines, stores or replays the samples of one run; {JOB_ARRAY}"
        ),
        "trace.steps": f"a trace records the steps of one run, but those of points alternate; {JOB_ARRAY}",
        "run.elastic.min_nodes": f"nodes are counted and replaced for one run; {JOB_ARRAY}",
        "logging.prometheus_port": "each point would need a port of its own; leave it out",
        "adapter.init=pissa": "pissa changes the base, which the points share; use adapter.init=zero",
    },
    "sweep.stop": {
        "not generation in the whole run": (
            "without generation each point runs to its end before the next, but the rule compares points at "
            "the same step; use sweep.stop=none"
        )
    },
    "model.numerics=bitwise": {
        "not samples": "it compares the trainer with the engine that sampled; use model.numerics=fast",
        "training.router_replay": "its passes do not support it; leave out one of the two",
        "adapters in the engine": f"vLLM adds B A x in kernels of its own; {MERGED}",
        "adapter.base=fp8": f"routed experts would not be dequantised; {MODEL_BASE}",
        "rollout.top_p, rollout.top_k, rollout.min_p, agents.structured_tool_calls": (
            "the bitwise log-softmax is over the whole vocabulary; leave it out"
        ),
        "rollout.carry_over": "older weights would sample a part of the tokens; leave it out",
        "lag": "older weights would sample; use roles.lag=0",
        "training.ep": "experts of several ranks are not summed in one order; use training.ep=1",
        "rollout.ep": "experts of several ranks are not summed in one order; use rollout.ep=1",
        "training.cp": "keys of several ranks are not summed in one order; use training.cp=1",
        (
            "rollout_correction.truncate_tokens, rollout_correction.truncate_samples, "
            "rollout_correction.icepop_high, rollout_correction.reject"
        ): "there is no difference to correct; leave it out",
        "rollout_correction.bypass": "the log-probs would not be compared; leave it out",
    },
    "teacher.advantage_coef": {
        "not a policy loss": "it is added to advantages; leave out teacher.advantage_coef",
        "a loss per sample": (
            "the teacher gives one advantage per token, but the loss requires one per sample; use "
            "objective.loss=ppo"
        ),
    },
    "feedback": {
        "selection by scores, teacher.student_share": (
            "samples are selected or added after their scores; leave {feedback} out of the template"
        )
    },
    "advantages of single rewards": {
        "objective.reward_kl.coef, reward.overlong_buffer_tokens, reward.model.path, reward.judge.path": (
            "it reads single numbers of the reward function, and that is a term of their sum; leave it out"
        )
    },
    "a loss of selected tokens": {"objective.top_entropy": "both select tokens; use one of the two"},
    "a loss per sample": {
        "a mean over tokens": (
            "the mean would weigh samples by their lengths; use objective.aggregation=seq-mean-token-mean"
        ),
        "advantages per token": "it requires one advantage per sample; use grpo or rloo",
        "weights of tokens": (
            "it is one number per sample; use truncate_samples, icepop_level=sample or reject of "
            "rollout_correction"
        ),
    },
    "a loss of weighted ratios": {
        "weights of samples": (
            "it multiplies the weights of a sample's tokens; use rollout_correction.truncate_tokens, or "
            "icepop_level=token"
        )
    },
    "rollout_correction.truncate_tokens": {
        "rollout_correction.truncate_samples, rollout_correction.icepop_high": (
            "both weigh a token by its ratio; set one of the two"
        )
    },
    "rollout_correction.truncate_samples": {
        "rollout_correction.icepop_high": "both weigh a token by its ratio; set one of the two"
    },
    "rollout_correction.bypass": {
        (
            "rollout_correction.truncate_tokens, rollout_correction.truncate_samples, "
            "rollout_correction.icepop_high, rollout_correction.reject"
        ): (
            "bypass uses the engine's log-probs as those of the old policy, which leaves nothing to correct; "
            "set one of the two"
        ),
        "advantages from probabilities, objective.adaptive_entropy.target": (
            "bypass leaves out the forward pass that this reads; set one of the two"
        ),
    },
    "not a policy loss": {
        (
            "rollout_correction.bypass, rollout_correction.truncate_tokens, "
            "rollout_correction.truncate_samples, rollout_correction.icepop_high, rollout_correction.reject"
        ): "the correction is for policy gradients; leave it out"
    },
}
"""Feature -> features that exclude it, separated by commas -> "reason; remedy"."""


_NOT_BUILT = {
    "a class of transformers": (
        "training.tp, training.pp, training.cp, training.ep, training.etp, training.vpp, "
        "training.recompute=selective, training.recompute_every, adapter.kind=dora, adapter.init=pissa, "
        "adapter.base=fp8, adapters in the engine, critic.share_base, roles, "
        "training.router_replay, a prediction head, model.numerics=bitwise, data.image_key, "
        "rollout.quantization=fp8, scaled rotation"
    ),
    "data.image_key": (
        "data.messages_key, whole responses, needs critic, reward.model.path, "
        "teacher.self_taught=present|initial, teacher.student_share, roles, rollout.carry_over, a sweep, "
        "run.mode=train_only, training.cp, training.vpp, model.numerics=bitwise"
    ),
    "model.vision=train": "adapters",
    "roles": "rollout.longest_first",
    "adapter.base=fp8": "adapter.kind=dora, critic.share_base, a sweep",
    "adapters in the engine": "adapter.kind=dora",
    "model.numerics=bitwise": (
        "training.router_replay, adapters in the engine, adapter.base=fp8, training.ep, rollout.ep, "
        "training.cp, rollout.top_p, rollout.top_k, rollout.min_p, agents.structured_tool_calls"
    ),
    "a sweep": "roles, rollout.carry_over, agents, trace.steps",
    "rollout.dp_attention": "roles, agents, adapters in the engine, reward.judge.path",
    "rollout.draft.method=mtp": "rollout.quantization=fp8, scaled rotation",
    "a prediction head": "training.vpp, training.cp, adapters, model.numerics=bitwise",
    "training.mtp.head_lr": "training.shared_prefix=true",
    "rollout.kv_offload_gib": "training.router_replay=engine, reward.judge.path",
    "drafts": (
        "roles, a sweep, agents, rollout.carry_over, adapters in the engine, rollout.ep, "
        "rollout.dp_attention, model.numerics=bitwise, rollout.min_p, rollout.stop, "
        "training.router_replay=engine"
    ),
    "rollout.quantization=fp8": "roles, adapters in the engine",
    "sampling masks": "run.mode=train_only",
    "training.router_replay=engine": "run.mode=train_only",
    "recomputed experts": "training.router_replay",
    "recomputed latents": "training.cp",
    "rollout.carry_over": "rollout.stop",
    "lag": "samples beside responses",
}
NOT_BUILT = {(first, second) for first, row in _NOT_BUILT.items() for second in row.split(", ")}
"""Pairs that would make sense together, but are not supported; all others of the table are meaningless."""


@dataclass(frozen=True)
class Exclusion:
    """Two features that a run cannot have both."""

    first: str
    second: str
    reason: str
    remedy: str

    def applies(self, config: Config) -> bool:
        return is_on(config, self.first) and is_on(config, self.second)

    def sentence(self, config: Config) -> str:
        first = setting(config, self.first)
        first += "," if ", which" in first else ""
        if self.second.startswith("not "):
            meets = f"requires {requirement(config, self.second.removeprefix('not '))}"
        else:
            meets = f"cannot be combined with {setting(config, self.second)}"
        return f"{first} {meets}, because {self.reason}; {self.remedy}."


@functools.cache
def exclusions() -> list[Exclusion]:
    """Return the pairs of the table in its order."""
    return [
        Exclusion(first, second, *text.split("; ", 1))
        for first, row in EXCLUSIONS.items()
        for others, text in row.items()
        for second in others.split(", ")
    ]


def check_exclusions(config: Config, of: Collection[str] = ()) -> None:
    """Raise ConfigError for the first two features of a config that exclude each other.

    of: features; if given, only the pairs with one of them are checked.
    """
    for exclusion in exclusions():
        if (not of or exclusion.first in of or exclusion.second in of) and exclusion.applies(config):
            raise ConfigError(exclusion.sentence(config))
