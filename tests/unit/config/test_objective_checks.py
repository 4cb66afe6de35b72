"""Combinations of algorithm, advantage, loss and aggregation, and the errors for invalid ones."""

import pytest

from rl.config.checks import check
from rl.config.declarations import NEEDS, describe, shipped
from rl.config.objective import ADVANTAGES, LOSSES, Objective
from rl.config.options import ConfigError
from rl.config.schema import load_config
from tests.configs import config_with, refusal
from tests.each import each
from tests.spawn import ROOT


@pytest.mark.parametrize("name", shipped())
def test_each_shipped_algorithm_passes_with_its_own_defaults(name):
    teacher = ["teacher.path=t"] if name == "distill" else []
    assert check(config_with(f"algorithm={name}", *teacher)) == []
    assert set(describe(name).needs) <= set(NEEDS)


def test_the_shipped_algorithms_are_those_with_a_page():
    assert shipped() == sorted(path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md"))


def test_file_and_overrides_win_over_an_algorithm(tmp_path):
    assert config_with("algorithm=dapo").objective.clip_high == 0.28
    assert config_with("algorithm=dapo", "objective.clip_high=0.4").objective.clip_high == 0.4
    (tmp_path / "config.yaml").write_text("algorithm: rloo\nobjective: {aggregation: token-mean}\n")
    config = load_config(tmp_path / "config.yaml")
    assert (config.objective.advantage, config.objective.aggregation) == ("rloo", "token-mean")


def test_an_unknown_algorithm_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="algorithm is 'GROP', but must be dapo, .* did you mean .grpo.?"):
        config_with("algorithm=GROP")


OWN = """NEEDS = ("samples", "reward")
DEFAULTS = {"objective.advantage": "reinforce++", "objective.loss": "ppo"}
"""


FUNCTIONS = "def collect(phases): ...\ndef learn(phases, batch): ...\n"


def test_a_policy_gradient_of_ones_own_needs_a_loss(tmp_path):
    (tmp_path / "mine.py").write_text(OWN.replace(', "objective.loss": "ppo"', "") + FUNCTIONS)
    text = refusal(f"algorithm={tmp_path}/mine.py")
    assert (
        "objective.loss=none" in text and "set objective.loss, e.g. ppo, or name it in the DEFAULTS" in text
    )


def test_an_algorithm_of_ones_own_is_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN + "import torch\n" + FUNCTIONS)
    config = config_with(f"algorithm={tmp_path}/mine.py")
    assert config.objective.advantage == "reinforce++" and check(config) == []


@each(
    "text, words",
    [
        (FUNCTIONS, "must set NEEDS, a tuple, and DEFAULTS"),
        (OWN + "def collect(phases): ...", "defines no function learn"),
        (OWN + "def step(phases, config): ...", "was split into collect and learn"),
        (OWN.replace('"reward"', '"rewards"') + FUNCTIONS, "needs 'rewards', which is none of"),
        ("def learn(", "cannot be read"),
        ("NEEDS = tuple(range(3))\nDEFAULTS = {}\n" + FUNCTIONS, "as literals"),
    ],
)
def test_an_unfit_file_is_refused_with_the_reason(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        config_with(f"algorithm={tmp_path}/mine.py")


@each("advantage", ADVANTAGES)
def test_grpo_takes_advantages_without_a_costly_need(advantage):
    if advantage in ("gae", "remax", "prime"):
        said = refusal(f"objective.advantage={advantage}")
        fitting = {"gae": "ppo", "remax": "remax", "prime": "prime"}[advantage]
        assert "which algorithm=grpo does not provide" in said and said.endswith(f"use algorithm={fitting}.")
    else:
        assert check(config_with(f"objective.advantage={advantage}")) == []


@pytest.mark.parametrize("loss", LOSSES)
def test_which_losses_go_with_grpo_and_ppo(loss):
    chosen = f"objective.loss={loss}"
    assert check(config_with(chosen)) == []
    if loss == "gmpo":
        assert "one advantage per sample" in refusal("algorithm=ppo", chosen)
        assert "would weigh samples by their lengths" in refusal(chosen, "objective.aggregation=token-mean")
    else:
        assert check(config_with("algorithm=ppo", chosen)) == []


@each(
    "overrides, words",
    [
        (
            ["algorithm=remax", "objective.advantage=reinforce++"],
            "provides the score of a greedy response to each prompt, which",
        ),
        (["algorithm=ppo", "objective.advantage=grpo"], "use algorithm=dapo, grpo, reinforce_pp or rloo."),
        (["algorithm=sft", "objective.loss=ppo"], "algorithm=sft has a loss of its own"),
        (["algorithm=dpo", "objective.advantage=rloo"], "algorithm=dpo has a loss of its own"),
        (["objective.loss=none"], "algorithm=grpo is a policy gradient; its default is ppo"),
        (["critic.warmup_steps=3"], "has no effect with algorithm=grpo; leave it out, or set algorithm=ppo"),
        (["preference.beta=0.3"], "; leave it out, or set algorithm=dpo, kto, orpo, simpo, spin or sppo"),
        (
            ["dynamic_sampling.max_rounds=3"],
            "has no effect with algorithm=grpo; leave it out, or set algorithm=dapo",
        ),
        (
            ["objective.reward_columns=[a]"],
            "has no effect with objective.advantage=grpo; leave it out, or set objective.advantage=gdpo",
        ),
        (
            ["objective.advantage=gdpo", "objective.reward_columns=[a, b]", "objective.reward_weights=[1.0]"],
            "1 numbers for 2",
        ),
        (
            ["objective.loss=clip-cov", "objective.cov_low=6"],
            "cov_low=6.0 is not below objective.cov_high=5.0",
        ),
        (["objective.reward_kl.controller=adaptive"], "no weight to start from"),
        (
            [
                "objective.reward_kl.controller=adaptive",
                "objective.reward_kl.coef=0.1",
                "objective.reward_kl.horizon=100",
            ],
            "in one step of 512 samples; use more than 103",
        ),
        (["rollout_correction.icepop_high=5", "rollout_correction.icepop_low=2"], "agree, whose ratio is 1"),
        (["rollout_correction.truncate_tokens=0.5"], "use 1 or more"),
        (["algorithm=sppo", "objective.top_entropy=0.2"], "top_entropy=0.2 has no effect"),
        (
            ["objective.adaptive_entropy.delta=0.1"],
            "; leave it out, or set objective.adaptive_entropy.target",
        ),
        (
            ["objective.adaptive_entropy.target=0.2", "objective.entropy_coef=2"],
            "entropy_coef=2.0, the first weight, must be from",
        ),
        (["rollout_correction.icepop_level=prefix"], "; leave it out, or set rollout_correction.icepop_high"),
        (["rollout_correction.reject=token-k3"], "which"),
        (["rollout_correction.reject_high=2"], "; leave it out, or set rollout_correction.reject"),
        (["rollout_correction.reject=token-k4"], "holds 'token-k4', but must be none, or one or more"),
        (["rollout_correction.reject=none,token-k1"], "holds 'none'"),
        (["rollout_correction.reject=token-k2,token-k2"], "repeats a criterion"),
        (
            ["rollout_correction.reject=token-k1,sample-k3", "rollout_correction.reject_high=[1, 2, 3]"],
            "reject_high has 3 numbers for 2 criteria",
        ),
        (
            ["rollout_correction.reject=token-k1,sample-k3", "rollout_correction.reject_high=[1, 0]"],
            "reject=sample-k3 keeps divergences from reject_low=0.0 to reject_high=0 nats",
        ),
        (["rollout_correction.reject_high=high"], "must be a finite number, or a list"),
        (["algorithm=prime", "implicit_reward.min_accuracy=0.9"], "no prompt would be left"),
        (["objective.gamma=0.9"], "; leave it out, or set objective.advantage=gae, prime or reinforce++"),
        (
            ["algorithm=ppo", "objective.filtration=best-worst"],
            "filtration=best-worst compares the samples of a prompt, but rollout.samples_per_prompt=1",
        ),
        (
            ["algorithm=ppo", "objective.filtration_power=3"],
            "objective.filtration_power=3.0 has no effect with objective.filtration=none; leave it out",
        ),
        (["objective.filtration=best"], "leave it out, or set objective.advantage=gae"),
        (["algorithm=ppo", "objective.lam_critic=1.5"], "lam_critic is 1.5, but must be from 0 to 1"),
        (
            ["objective.dro_beta=0.3"],
            "has no effect with objective.loss=ppo; leave it out, or set objective.loss=dro",
        ),
        (
            ["objective.loss=clip-cov", "objective.dual_clip=10"],
            "has no effect with objective.loss=clip-cov; leave it out, or set objective.loss=fipo or ppo",
        ),
        (
            ["objective.dppo_max_ratio=5"],
            "has no effect with objective.loss=ppo; leave it out, or set objective.loss=dppo-kl or dppo-tv",
        ),
        (
            ["algorithm=sft", "objective.kl_coef=0.1"],
            "objective.kl_coef=0.1 has no effect with algorithm=sft",
        ),
        (
            ["algorithm=sft", "preference.beta=0.3"],
            "; leave it out, or set algorithm=dpo, kto, orpo, simpo, spin or sppo",
        ),
        (
            ["algorithm=sppo", "preference.loss=ipo"],
            "has no effect with algorithm=sppo; leave it out, or set algorithm=dpo or spin",
        ),
        (["algorithm=dpo", "preference.gamma=1"], "preference.gamma=1.0 has no effect with algorithm=dpo"),
        (
            ["algorithm=simpo", "preference.loss=hinge"],
            "has no effect with algorithm=simpo; leave it out, or set algorithm=dpo or spin",
        ),
        (["algorithm=kto", "training.prompts_per_minibatch=1"], "prompts_per_minibatch=1 leaves"),
        (["algorithm=kto", "data.prompts_per_step=1"], "data.prompts_per_step=1 leaves algorithm=kto no"),
        (
            ["algorithm=dpo", "preference.loss=hinge", "preference.label_smoothing=0.1"],
            "no effect with preference.loss=hinge",
        ),
        (["algorithm=dpo", "preference.label_smoothing=0.5"], "at least 0 and less than 0.5"),
        (["data.train_weights=[1.0, 2.0]"], "2 numbers for 1 files"),
        (["data.val=v.jsonl", "validation.greedy=false"], "nothing to validate with"),
        (["rollout.top_p=0.9", "validation.top_p=1.0"], "the whole vocabulary for every token"),
        (["critic.optimizer.min_lr=1"], "critic.optimizer.min_lr=1.0 is above"),
        (
            ["algorithm=rloo", "rollout.samples_per_prompt=1"],
            "leaves objective.advantage=rloo no other sample of the prompt to compare with, so nothing is",
        ),
        (["algorithm=sppo", "rollout.samples_per_prompt=1"], "leaves algorithm=sppo no other sample"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(overrides, words):
    assert words in refusal(*overrides)


@each(
    "overrides, words",
    [
        (["objective.loss=reinforce", "training.epochs=2"], "has no ratio to correct for the updates"),
        (
            ["algorithm=ppo", "objective.reward_kl.controller=adaptive", "objective.reward_kl.target=6"],
            "target=6 is in nats per token",
        ),
        (["objective.kl_coef=0.1", "objective.kl_estimator=k1"], "mean gradient of 0"),
        (["algorithm=ppo", "critic.warmup_steps=100"], "the policy never moves"),
        (["algorithm=ppo", "critic.optimizer.warmup_steps=100"], "the run ends within the warm-up"),
    ],
)
def test_what_is_unlikely_to_be_meant_is_warned_of(overrides, words):
    (warning,) = check(config_with(*overrides))
    assert words in warning


def test_one_sample_per_prompt_is_enough_without_groups():
    for learns in (
        ["run.mode=rollout_only", "logging.rollouts=all"],
        ["teacher.advantage_coef=1", "teacher.path=t"],
        ["objective.kl_coef=0.1"],
    ):
        assert check(config_with("rollout.samples_per_prompt=1", *learns)) == []
    assert check(config_with("algorithm=reinforce_pp", "rollout.samples_per_prompt=1")) == []
    assert check(config_with("objective.advantage=reinforce++", "rollout.samples_per_prompt=1")) == []


def test_every_parameter_of_a_formula_is_a_key_or_has_a_default():
    own_sections = {"process_coef", "outcome_coef"}  # of implicit_reward, which prime.py reads
    with_default = {"eps", "norm", "zero_tail", "seed"}
    for formula in [*ADVANTAGES.values(), *LOSSES.values()]:
        unknown = formula.reads - set(vars(Objective())) - own_sections - with_default
        assert not unknown and set(formula.needs) <= set(NEEDS), (formula.function, unknown)


@each(
    "reject, low, high, expected",
    [
        ("none", "0", "0", []),
        ("token-k1", "-0.7", "0.7", [("token-k1", -0.7, 0.7)]),
        ("token-k1, sample-k3", "[-0.7, 0]", "[0.7, 0.1]", [("token-k1", -0.7, 0.7), ("sample-k3", 0, 0.1)]),
        ("sample-k2,token-k2", "0", "0.5", [("sample-k2", 0, 0.5), ("token-k2", 0, 0.5)]),
    ],
)
def test_rejection_takes_one_criterion_or_several(reject, low, high, expected):
    bounds = (f"rollout_correction.reject_low={low}", f"rollout_correction.reject_high={high}")
    config = config_with(f"rollout_correction.reject={reject}", *bounds)
    assert check(config) == []
    found = config.rollout_correction.rejections
    assert [(criterion.name, criterion.low, criterion.high) for criterion in found] == expected
    for criterion in found:
        assert criterion.level == ("sequence" if criterion.name.startswith("sample") else "token")
        assert criterion.statistic == criterion.name[-2:]


def test_one_key_turns_token_level_truncation_on():
    assert check(config_with("rollout_correction.truncate_tokens=2.0")) == []
