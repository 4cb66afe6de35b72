"""The table of exclusions: each pair in it is refused with its sentence, every other pair is accepted."""

import pytest

from rl.config.checks import check
from rl.config.exclusions import NOT_BUILT, exclusions
from rl.config.features import is_on
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config
from tests.each import each

LAG = "roles.train=0-0 roles.rollout=1-1 rollout_correction.truncate_tokens=2"
ROLES = "roles.train=0-0 roles.rollout=1-1 roles.lag=0"
TEACHER = "teacher.self_taught=present teacher.advantage_coef=0.1"
CHATS = "algorithm=sft data.messages_key=messages data.val=[v.jsonl]"
TRUNCATE = "rollout_correction.truncate_tokens=2"
EXAMPLES = {
    "data.image_key": "data.image_key=images",
    "a class of transformers": "training.backend=transformers",
    "not a class of transformers": "training.backend=megatron",
    "training.shard": "training.shard=2",
    "training.tp": "training.tp=2",
    "training.pp": "training.pp=2",
    "training.etp": "training.etp=2",
    "training.recompute_every": "training.recompute=full training.recompute_every=2",
    "training.vpp": "training.vpp=2 training.pp=2",
    "needs critic": "algorithm=ppo",
    "data.curriculum": "data.curriculum=own:order",
    "template variables": "data.template_kwargs={enable_thinking:false}",
    "data.train_weights": "data.train_weights=[1.0]",
    "run.rollouts": "run.mode=score_only run.rollouts=runs/other",
    "run.mode=rollout_only|score_only|train_only": "run.mode=score_only",
    "rollout.stop": "rollout.stop=END",
    "rollout.top_p": "rollout.top_p=0.9",
    "rollout.top_k": "rollout.top_k=5",
    "rollout.min_p": "rollout.min_p=0.1",
    "rollout.carry_over": f"rollout.carry_over=true {TRUNCATE}",
    "rollout.carry_over_cache=keep": f"rollout.carry_over_cache=keep rollout.carry_over=true {TRUNCATE}",
    "roles.min_replicas": f"roles.min_replicas=1 {ROLES}",
    "roles.granularity=turn|group|sample": f"roles.granularity=group {LAG}",
    "training.router_replay": "training.router_replay=old_policy",
    "training.ep": "training.ep=2",
    "refit.changed_only": "refit.changed_only=true",
    "rollout.dp_attention": "rollout.ep=2 rollout.dp_attention=true",
    "rollout.ep": "rollout.ep=2",
    "drafts": "rollout.draft.path=d",
    "rollout.draft.path": "rollout.draft.path=d",
    "rollout.kv_offload_gib": "rollout.kv_offload_gib=1 agents.environment=game.py:Game",
    "a prediction head": "training.mtp.head_lr=0.1",
    "training.mtp.head_lr": "training.mtp.head_lr=0.1",
    "scaled rotation": "model.rope_scaling={rope_type:linear,factor:2.0}",
    "training.router_replay=engine": "training.router_replay=engine",
    "rollout.quantization=fp8": "rollout.quantization=fp8",
    "training.cp": "training.cp=2",
    "adapter.init=pissa": "adapter.init=pissa adapter.kind=lora",
    "adapter.base=fp8": "adapter.base=fp8 adapter.kind=lora",
    "adapter.path": "adapter.path=a adapter.kind=lora",
    "critic.share_base": "critic.share_base=true algorithm=ppo adapter.kind=lora",
    "critic.path": "critic.path=c algorithm=ppo",
    "reward.model.path": "reward.model.path=r",
    "reward.judge.path": "reward.judge.path=j",
    "reward.overlong_buffer_tokens": "reward.overlong_buffer_tokens=4",
    "logging.prometheus_port": "logging.prometheus_port=9000",
    "trace.steps": "trace.steps=[1]",
    "run.elastic.min_nodes": "run.elastic.min_nodes=1 run.elastic.max_nodes=2 checkpoint.every=1",
    "teacher.advantage_coef": f"teacher.advantage_coef=0.1 {TEACHER}",
    "teacher.student_share": "teacher.student_share=0.5 algorithm=distill teacher.self_taught=present",
    "objective.reward_kl.coef": "objective.reward_kl.coef=0.1",
    "objective.top_entropy": "objective.top_entropy=0.2",
    "objective.adaptive_entropy.target": "objective.adaptive_entropy.target=0.2",
    "rollout_correction.truncate_tokens": "rollout_correction.truncate_tokens=2",
    "rollout_correction.truncate_samples": "rollout_correction.truncate_samples=2",
    "rollout_correction.icepop_high": "rollout_correction.icepop_high=5",
    "rollout_correction.reject": "rollout_correction.reject=token-k1 rollout_correction.reject_high=1",
    "run.mode=train_only": "run.mode=train_only run.rollouts=runs/other",
    "run.mode=rollout_only": "run.mode=rollout_only logging.rollouts=all",
    "data.messages_key": f"data.messages_key=messages {CHATS}",
    "data.train_on": f"data.train_on=last {CHATS}",
    "data.overlong_prompts=truncate_right": f"data.overlong_prompts=truncate_right {CHATS}",
    "data.overlong_prompts=truncate_left": "data.overlong_prompts=truncate_left",
    "sweep.stop": "sweep.stop=median",
    "rollout.longest_first": "rollout.longest_first=true",
    "rollout.deterministic": "rollout.deterministic=true",
    "agents.structured_tool_calls": "agents.structured_tool_calls=true",
    "rollout_correction.bypass": "rollout_correction.bypass=true",
    "samples": "algorithm=grpo",
    "not samples": "algorithm=sft",
    "not generation in the whole run": "algorithm=sft",
    "not a policy loss": "algorithm=sppo",
    "not a loss of older tokens": "algorithm=sppo",
    "not scored samples": "algorithm=distill teacher.self_taught=present",
    "not responses in the data": "algorithm=grpo",
    "not sft": "algorithm=grpo",
    "greedy baselines": "algorithm=remax",
    "whole responses": "algorithm=prime",
    "selection by scores": "algorithm=dapo",
    "samples beside responses": "algorithm=spin",
    "learning from the data": "algorithm=distill teacher.self_taught=present teacher.student_share=0.5",
    "advantages of single rewards": "objective.advantage=gdpo",
    "advantages per token": "algorithm=ppo",
    "advantages from probabilities": "objective.advantage=optimal-token-baseline",
    "a loss of selected tokens": "objective.loss=kl-cov",
    "a loss per sample": "objective.loss=gmpo objective.aggregation=seq-mean-token-mean",
    "a loss of weighted ratios": "objective.loss=vespo",
    "agents": "agents.environment=game.py:Game",
    "not adapters": "adapter.kind=none",
    "adapters": "adapter.kind=lora",
    "roles": ROLES,
    "not roles": "roles.train= roles.rollout=",
    "a sweep": "sweep.adapters=[{run.seed:1}] adapter.kind=lora adapter.in_engine=adapter",
    "a teacher": TEACHER,
    "teacher.self_taught=present|initial": TEACHER,
    "distillation": "algorithm=distill teacher.self_taught=present",
    "new rows": "agents.environment=game.py:Game agents.on_rewrite=new_row",
    "order of arrival": "agents.environment=game.py:Game agents.order=arrival",
    "adapters in the engine": "adapter.kind=lora adapter.in_engine=adapter",
    "recomputed experts": "training.recompute=selective training.recompute_modules=[moe]",
    "recomputed latents": "training.recompute=selective training.recompute_modules=[mla_up_proj]",
    "merged adapters": "adapter.kind=lora adapter.in_engine=merged",
    "a large rank": "adapter.kind=lora adapter.rank=1024",
    "lag": LAG,
    "no lag": ROLES,
    "sampling masks": "rollout.top_p=0.9",
    "not a correction": "rollout_correction.truncate_tokens=0",
    "weights of tokens": TRUNCATE,
    "weights of samples": "rollout_correction.truncate_samples=2",
    "a mean over tokens": "objective.aggregation=token-mean",
    "feedback": TEACHER + " teacher.template='{prompt}{feedback}'",
    "a held-out loss": "data.val=[v.jsonl] validation.loss=true",
    "held-out responses": "data.val=[v.jsonl] validation.greedy=true",
    "not data.messages_key": "data.messages_key=",
}
"""Feature -> keys that switch it on in a valid config; by default its key with its first value."""

FEATURES = sorted({feature for pair in exclusions() for feature in (pair.first, pair.second)})
DECLARED = ("has no effect", "have no effect", "has a loss of its own", "does not provide", "does not read")
"""Parts of refusals that other tables cause, for example READ_WITH and the needs of advantages."""


def example(feature: str) -> list[str]:
    return EXAMPLES.get(feature, feature.partition("|")[0]).split()


def config_with(*features: str) -> Config | None:
    """Return a config that has all these features; None if two features need different values of a key."""
    keys = [key for feature in features for key in example(feature)]
    for order in (keys, keys[::-1]):
        config = load_config(None, ["model.path=m", "data.train=[d]", *order])
        if all(is_on(config, feature) for feature in features):
            return config
    return None


def refusal(config: Config) -> str:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


@each("pair", exclusions())
def test_every_pair_of_the_table_is_refused(pair):
    config = config_with(pair.first, pair.second)
    assert config is not None and pair.applies(config)
    assert refusal(config) in [other.sentence(config) for other in exclusions() if other.applies(config)]
    sentence = pair.sentence(config)
    relation = " requires " if pair.second.startswith("not ") else " cannot be combined with "
    assert relation in sentence and sentence.endswith(f"because {pair.reason}; {pair.remedy}.")
    assert "{" not in sentence.replace("{feedback}", "")


def test_what_is_not_built_is_in_the_table():
    assert NOT_BUILT <= {(pair.first, pair.second) for pair in exclusions()}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", FEATURES)
def test_other_pairs_are_accepted(first, every):
    for second in FEATURES[FEATURES.index(first) :: every]:
        config = config_with(first, second)
        if config is not None and not any(pair.applies(config) for pair in exclusions()):
            said = refusal(config)
            assert not said or any(words in said for words in DECLARED), (second, said)


def test_the_sentence_names_values_reason_and_remedy():
    config = config_with("rollout.carry_over", "rollout.stop")
    assert config is not None
    assert refusal(config) == (
        'rollout.carry_over=true cannot be combined with rollout.stop=["END"], because a stop string could '
        "begin in one step and end in the next; use rollout.stop_token_ids."
    )
    config = config_with("rollout.carry_over", "not a correction")
    assert config is not None
    assert refusal(config) == (
        "rollout.carry_over=true requires a weight in rollout_correction, because tokens of older weights "
        "need a correction; set rollout_correction.truncate_tokens=2, or another weight, or "
        "rollout_correction.bypass=true."
    )
    config = config_with("roles", "not samples")
    assert config is not None
    assert refusal(config) == (
        "roles.rollout=1-1 requires an algorithm that learns from samples, unlike algorithm=sft, because "
        "generators produce samples to learn from; leave out the section roles."
    )
    keys = [*example("run.mode=train_only"), "rollout.top_k=5"]
    config = load_config(None, ["model.path=m", "data.train=[d]", *keys])
    assert "rollout.top_p=1.0, top_k=5, min_p=0.0 cannot be combined with run.mode=train_only" in refusal(
        config
    )
