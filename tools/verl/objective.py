"""The algorithm of a verl run, its loss, KL terms and corrections, in the words of this project."""

from math import log
from typing import Any

from tools.verl.keys import AGGREGATIONS, ALGORITHMS, FILTRATIONS, KL_ESTIMATORS, LOSSES, WEIGHTS
from tools.verl.script import VerlSettings

NO_RATIO = ("gmpo", "dppo-kl")
"""Losses with a clip_low that bounds a log-ratio or a divergence, and may be above 1."""
ALWAYS_SEQUENCE_MEAN = ("sapo", "geo_mean")
"""Losses that verl averages as seq-mean-token-mean whatever `loss_agg_mode` says."""


def pick(settings: VerlSettings, key: str, default: str, table: dict[str, Any]) -> Any:
    """Return the table's entry for a setting. Raises ValueError if it has none."""
    value = str(settings.get(key, default))
    if value not in table:
        raise ValueError(
            f"{key}={value} has no counterpart; it must be one of {', '.join(table)}. Choose another, or "
            "write rl/objectives or rl/algorithms (docs/extending.md)."
        )
    return table[value]


def objective(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate the algorithm, its loss and its KL terms."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    algorithm, advantage = pick(settings, "algorithm.adv_estimator", "gae", ALGORITHMS)
    is_alone = get("actor_rollout_ref.rollout.n", 1) == 1 and not get("distillation.enabled", False)
    if is_alone and (algorithm, advantage) == ("grpo", None):
        algorithm = "reinforce_pp"
        notes.append(
            "algorithm=reinforce_pp, because with actor_rollout_ref.rollout.n=1 verl's grpo takes the raw "
            "score as the advantage; reinforce_pp subtracts the mean of the batch."
        )
    loss_mode = str(get(f"{actor}.policy_loss.loss_mode", "vanilla"))
    loss = pick(settings, f"{actor}.policy_loss.loss_mode", "vanilla", LOSSES)
    aggregation = pick(settings, f"{actor}.loss_agg_mode", "token-mean", AGGREGATIONS)
    clip_low, clip_high = clip_range(settings, notes)
    if loss in NO_RATIO and clip_low > 1:
        raise ValueError(
            f"{actor}.clip_ratio_low={clip_low} with loss_mode={loss_mode} bounds a log-ratio or divergence, "
            "but objective.clip_low is at most 1; use 1, which is a ratio of 0.37."
        )
    ours: dict[str, Any] = {"algorithm": algorithm, "objective.loss": loss}
    if advantage:
        ours["objective.advantage"] = advantage
    if get("algorithm.filter_groups.enable", False):
        get("algorithm.filter_groups.metric")
        ours |= {
            "algorithm": "dapo",
            "dynamic_sampling.max_rounds": get("algorithm.filter_groups.max_num_gen_batches", 10) or 10,
            "dynamic_sampling.prompts_per_round": get("data.gen_batch_size", 0),
        }
    ours |= {
        "objective.aggregation": "seq-mean-token-mean" if loss_mode in ALWAYS_SEQUENCE_MEAN else aggregation,
        # A ratio is positive, so that a bound below 0 is one of 0. Probabilities differ by at most 1.
        "objective.clip_low": min(clip_low, 1.0),
        "objective.clip_high": clip_high,
        "objective.entropy_coef": get(f"{actor}.entropy_coeff", 0),
        "objective.kl_coef": 0.0,
        "objective.reward_kl.coef": 0.0,
    }
    if loss == "gspo" and aggregation != "seq-mean-token-mean":
        notes.append(
            f"objective.aggregation={aggregation}, as in verl 0.9.1; verl up to 0.9.0 averaged gspo as "
            "seq-mean-token-mean whatever loss_agg_mode said."
        )
    scale, longest = get(f"{actor}.loss_scale_factor"), get("data.max_response_length", 512)
    if aggregation == "seq-mean-token-sum-norm" and scale not in (None, longest):
        raise ValueError(
            f"{actor}.loss_scale_factor={scale}: seq-mean-token-sum-norm divides by "
            f"rollout.max_response_tokens={longest} here; scale {actor}.optim.lr instead."
        )
    dual_clip = get(f"{actor}.clip_ratio_c", 3.0)
    if loss == "ppo":
        ours["objective.dual_clip"] = dual_clip
    if loss.startswith("dppo"):
        ours["objective.dppo_max_ratio"] = dual_clip
    if loss == "dro":
        ours["objective.dro_beta"] = get(f"{actor}.policy_loss.dro_beta", 0.0)
    if loss == "sapo":
        ours["objective.sapo_tau_positive"] = get(f"{actor}.tau_pos", 1.0)
        ours["objective.sapo_tau_negative"] = get(f"{actor}.tau_neg", 1.05)
    if loss in ("clip-cov", "kl-cov"):
        part = f"{actor}.policy_loss.{loss_mode}"
        ours["objective.cov_fraction"] = get(f"{part}_ratio", 0.0002)
    if loss == "clip-cov":
        ours["objective.cov_low"] = get(f"{actor}.policy_loss.clip_cov_lb", 1.0)
        ours["objective.cov_high"] = get(f"{actor}.policy_loss.clip_cov_ub", 5.0)
    if loss == "kl-cov":
        ours["objective.kl_cov_coef"] = get(f"{actor}.policy_loss.ppo_kl_coef", 0.1)
    if algorithm in ("ppo", "reinforce_pp"):
        ours["objective.gamma"] = get("algorithm.gamma", 1.0)
    if algorithm == "ppo":
        ours |= {
            "objective.lam": get("algorithm.lam", 1.0),
            "critic.warmup_steps": get("trainer.critic_warmup", 0),
            "critic.value_clip": get("critic.cliprange_value", 0.5),
            "critic.path": get("critic.model.path", ""),
        }
        if ours["critic.path"] == get("actor_rollout_ref.model.path"):
            ours["critic.path"] = ""
    if algorithm == "ppo" and get("algorithm.use_pf_ppo", False):
        ours |= filtration(settings, notes)
    if advantage in (None, "grpo") and algorithm == "grpo":
        ours["objective.normalize_by_std"] = get("algorithm.norm_adv_by_std_in_grpo", True)
    return ours | kl_terms(settings, algorithm, notes) | correction(settings)


def filtration(settings: VerlSettings, notes: list[str]) -> dict[str, Any]:
    """Translate PF-PPO."""
    method = pick(settings, "algorithm.pf_ppo.reweight_method", "pow", FILTRATIONS)
    ranks = "; a rank is among the samples of a prompt, in verl of the batch" * (method != "power")
    notes.append(
        f"objective.filtration={method}: the policy loss of a sample is weighted as often as verl expects to "
        f"draw it again, and the critic learns from all samples{ranks}."
    )
    ours = {"objective.filtration": method}
    power = settings.get("algorithm.pf_ppo.weight_pow", 2.0)
    return ours | ({"objective.filtration_power": power} if method == "power" else {})


def clip_range(settings: VerlSettings, notes: list[str]) -> tuple[float, float]:
    """Return verl's clip_ratio_low and clip_ratio_high.

    verl's own configs set both to 0.2, and then do not read clip_ratio; it counts where a bound is null.
    """
    part, given = "actor_rollout_ref.actor.clip_ratio", settings.given
    both = settings.get(part, 0.2)
    bounds = [f"{part}_low", f"{part}_high"]
    low, high = (settings.get(key, both if key in given else 0.2) for key in bounds)
    if both != 0.2 and not set(bounds) <= set(given):
        notes.append(
            f"{part}={both} has no effect in verl, whose defaults of clip_ratio_low and _high, 0.2, come "
            f"first: the run had {low} and {high}."
        )
    return low, high


def kl_terms(settings: VerlSettings, algorithm: str, notes: list[str]) -> dict[str, Any]:
    """Translate the KL divergence from the reference policy, in the loss and in the reward."""
    get, actor = settings.get, "actor_rollout_ref.actor"
    ours: dict[str, Any] = {}
    if get(f"{actor}.use_kl_loss", False):
        ours["objective.kl_coef"] = get(f"{actor}.kl_loss_coef", 0.001)
        kind = str(get(f"{actor}.kl_loss_type", "low_var_kl"))
        plus = "+" if kind.endswith("+") else ""
        settings.given[f"{actor}.kl_loss_type"] = kind.removesuffix("+")
        name = pick(settings, f"{actor}.kl_loss_type", "", KL_ESTIMATORS) + plus
        ours["objective.kl_estimator"] = name
    if get("algorithm.use_kl_in_reward", False):
        if algorithm == "remax":
            notes.append(
                "objective.reward_kl: an advantage has the penalties of the whole response; verl's has those "
                "from its token on, with the same expected gradient."
            )
        ours |= {
            "objective.reward_kl.coef": get("algorithm.kl_ctrl.kl_coef", 0.001),
            "objective.reward_kl.estimator": pick(settings, "algorithm.kl_penalty", "kl", KL_ESTIMATORS),
            "objective.reward_kl.controller": get("algorithm.kl_ctrl.type", "fixed"),
            "objective.reward_kl.horizon": get("algorithm.kl_ctrl.horizon", 10000),
            "objective.reward_kl.target": get("algorithm.kl_ctrl.target_kl", 0.1),
        }
    return ours


def correction(settings: VerlSettings) -> dict[str, Any]:
    """Translate the rollout correction."""
    get, part = settings.get, "algorithm.rollout_correction"
    ours: dict[str, Any] = {}
    if get(f"{part}.rollout_is"):
        key = pick(settings, f"{part}.rollout_is", "", WEIGHTS)
        low, _, high = str(get(f"{part}.rollout_is_threshold", "2.0")).partition("_")
        if high:
            level = {"truncate_tokens": "token", "truncate_samples": "sample"}[key]
            band = {"icepop_low": float(low), "icepop_high": float(high), "icepop_level": level}
            ours |= {f"rollout_correction.{name}": value for name, value in band.items()}
        else:
            ours[f"rollout_correction.{key}"] = float(low)
    if get(f"{part}.bypass_mode", False):
        if get(f"{part}.loss_type", "ppo_clip") != "ppo_clip":
            raise ValueError(
                f"{part}.loss_type={get(f'{part}.loss_type')} with bypass_mode=True weighs samples by their "
                "ratio to the engine in every update, without a clip, which no loss here does; use "
                "ppo_clip, or bypass_mode=False."
            )
        settings.used -= {f"{part}.rollout_is", f"{part}.rollout_is_threshold"}
        return {"rollout_correction.bypass": True}
    criteria = str(get(f"{part}.rollout_rs", "")).split(",")
    if criteria != [""]:
        bounds = str(get(f"{part}.rollout_rs_threshold", "2.0")).split(",")
        if len(bounds) != len(criteria):
            raise ValueError(
                f"{part}.rollout_rs has {len(criteria)} criteria and rollout_rs_threshold {len(bounds)} "
                "bounds; give one for each, separated by commas."
            )
        names, lows, highs = [], [], []
        for name, bound in zip(criteria, bounds, strict=True):
            kind, _, statistic = name.strip().rpartition("_")
            if kind not in ("token", "seq_mean"):
                settings.given[f"{part}.rollout_rs: {name.strip()}"] = bound.strip()
                continue
            low, _, high = bound.strip().partition("_")
            names.append(("token-" if kind == "token" else "sample-") + statistic)
            if statistic == "k1":  # verl's bounds of k1 are ratios
                upper = float(high or low)
                lows.append(log(float(low) if high else 1 / upper))
                highs.append(log(upper))
            else:
                lows.append(0.0)
                highs.append(float(high or low))
        if names:
            ours["rollout_correction.reject"] = ",".join(names)
            ours["rollout_correction.reject_low"] = lows
            ours["rollout_correction.reject_high"] = highs
    return ours
