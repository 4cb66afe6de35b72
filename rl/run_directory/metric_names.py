"""Every metric that a run logs: name, unit, formula, and what a bad value means.

    python -m rl.run_directory.metric_names     write the table into docs/metrics.md

In a name `{a,b}` stands for one of several parts, `<k>` and `<n>` for a number, and another `<x>` for any
text, such as a data source. Tests compare the table with what runs log and with the source.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from rl.config.tables import MARK

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    """"" for a number without one."""
    formula: str
    bad: str
    """Meaning of a bad value, and the remedy; "" if no value is bad by itself."""

    @property
    def pattern(self) -> str:
        """Regular expression of the name."""
        return _pattern(self.name)


def _pattern(name: str) -> str:
    text = ""
    for part in re.split(r"(\{[^}]*\}|<[^>]*>)", name):
        if part in ("<k>", "<n>"):
            text += r"\d+"
        elif part.startswith("<"):
            text += ".+"
        elif part.startswith("{"):
            text += f"(?:{'|'.join(map(_pattern, part[1:-1].split(',')))})"
        else:
            text += re.escape(part)
    return text


SPREAD = "{mean,max,min}"
M = Metric

METRICS: dict[str, tuple[Metric, ...]] = {
    "Scores and rewards": (
        M(
            f"critic/score/{SPREAD}",
            "score",
            "result of the reward function, over the samples of the step",
            "Flat from the start: all samples of a group score the same; try an easier data set, a higher "
            "`rollout.temperature`, or a graded score. Rises while `val-core` falls: the reward is "
            "exploited; read samples (`tools/report.py`).",
        ),
        M(
            f"critic/rewards/{SPREAD}",
            "score",
            "score less the overlong penalty and `objective.reward_kl.coef` times the KL divergence",
            "Far below the score: a penalty dominates; see `reward/overlong_penalty/mean` and "
            "`actor/reward_kl_penalty`.",
        ),
        M("critic/baseline/mean", "score", "mean reward of the greedy responses (ReMax)", ""),
        M(
            "reward/failures",
            "samples",
            "calls of the reward function that raised or exceeded `reward.timeout_s`; they score "
            "`reward.failure_score`",
            "Above 0: the log has the first error. Failures that follow from responses teach the policy to "
            "avoid or to cause them; make the function handle every response.",
        ),
        M(
            "reward/<name>/mean",
            "",
            "mean of another number that the reward function returns, over the samples that have it",
            "",
        ),
        M(
            "reward/overlong_penalty/mean",
            "score",
            "mean penalty of `reward.overlong_buffer_tokens`",
            "Rises with `response_length/mean`: the policy runs into the limit; raise "
            "`rollout.max_response_tokens` or the penalty.",
        ),
    ),
    "Lengths": (
        M(
            f"response_length/{SPREAD}",
            "tokens",
            "tokens that the policy sampled, per sample",
            "Collapses: the reward favours short answers. Grows without a better score: it favours long "
            "ones; see `objective.aggregation` and the overlong penalty.",
        ),
        M(
            "response_length/clip_ratio",
            "share",
            "responses that ended at `rollout.max_response_tokens` / all",
            "Above about 0.1: the limit truncates answers, which then score as wrong; raise it. Near 1 at "
            "step 1: the chat template or the end token is wrong.",
        ),
        M(
            f"response_length_non_aborted/{SPREAD}",
            "tokens",
            "as `response_length/*`, without responses of no token",
            "",
        ),
        M(
            "response_length_non_aborted/clip_ratio",
            "share",
            "as `response_length/clip_ratio`, without responses of no token",
            "",
        ),
        M(
            "response/aborted_ratio",
            "share",
            "responses without a token / all",
            "Above 0: the policy ends at once; the prompt may already end with the end token.",
        ),
        M(f"prompt_length/{SPREAD}", "tokens", "tokens of the prompts, per sample", ""),
        M(
            "prompt_length/clip_ratio",
            "share",
            "prompts with at least `data.max_prompt_tokens` tokens / all",
            "Above 0: longer prompts were dropped when the data was read; raise the limit.",
        ),
        M(f"num_turns/{SPREAD}", "turns", "turns that the policy sampled, per trajectory", ""),
        M(
            "global_seqlen/{min,max,minmax_diff}",
            "tokens",
            "prompt and response tokens of a data parallel rank, if samples were dealt in order",
            "",
        ),
        M(
            "global_seqlen/{balanced_min,balanced_max}",
            "tokens",
            "the same in the plan of the updates, which balances cost",
            "",
        ),
        M("global_seqlen/mean", "tokens", "tokens of all samples / data parallel ranks", ""),
    ),
    "Policy": (
        M("actor/pg_loss", "", "policy loss, mean over the step's mini-batches", "NaN ends the run."),
        M(
            "actor/entropy",
            "nats",
            "mean over tokens of the entropy of the policy before the step's updates",
            "Falls to 0 within a few steps: collapse; lower the learning rate, raise "
            "`objective.clip_high`, or use an entropy bonus. Rises steadily: the updates make the policy "
            "random; lower the learning rate.",
        ),
        M("actor/entropy_coef", "", "weight of the entropy bonus (`objective.adaptive_entropy`)", ""),
        M(
            "actor/ppo_kl",
            "nats",
            "mean over tokens of log pi_old - log pi, mean over the updates",
            "Above about 0.1: updates move the policy too far; lower the learning rate or the number of "
            "updates per step. Not 0 with one update per step: a bug.",
        ),
        M(
            "actor/pg_clipfrac",
            "share",
            "tokens at which the loss clips / all; each loss says when it does",
            "Above about 0.3: many tokens give no gradient; fewer updates per step or a lower learning rate.",
        ),
        M("actor/pg_clipfrac_lower", "share", "tokens at the second bound (`objective.dual_clip`) / all", ""),
        M("actor/pg_covfrac", "share", "tokens that clip-cov or kl-cov selects / all", ""),
        M("actor/{fipo_weight,vespo_weight}", "", "mean weight of a token in the loss of that name", ""),
        M(
            "actor/fipo_dropped",
            "share",
            "tokens of samples that fipo drops (two beyond the dual clip) / all",
            "",
        ),
        M(
            "actor/off_policy_masked_fraction",
            "share",
            "tokens that `objective.off_policy_mask` removes / all",
            "Near 1: nothing is learned; samples are too old or engine and trainer differ.",
        ),
        M(
            "actor/kl_loss",
            "nats",
            "KL divergence from the reference by `objective.kl_estimator`, in the loss",
            "Grows without bound: raise `objective.kl_coef` or lower the learning rate. Not 0 at step 1: "
            "policy and reference differ, which a check reports.",
        ),
        M("actor/kl_coef", "", "`objective.kl_coef`", ""),
        M("actor/reward_kl_penalty", "nats", "KL divergence that is subtracted from the rewards", ""),
        M("actor/reward_kl_penalty_coeff", "", "its weight, which a controller may change", ""),
        M(
            "actor/grad_norm",
            "",
            "norm of the gradient before clipping, mean over the updates",
            "Spikes: single samples dominate; see `optimizer.clip_grad`. 0: no group has different rewards.",
        ),
        M("actor/lr", "", "learning rate of the step", ""),
        M(
            f"critic/advantages/{SPREAD}",
            "",
            "advantage, over tokens that count",
            "All 0: every group has one reward; nothing is learned.",
        ),
    ),
    "Critic": (
        M(f"critic/values/{SPREAD}", "score", "value before the step's updates, over tokens that count", ""),
        M(f"critic/returns/{SPREAD}", "score", "return, over tokens that count", ""),
        M(
            "critic/vf_loss",
            "",
            "value loss, mean over the updates",
            "Grows: lower the critic's learning rate.",
        ),
        M(
            "critic/vf_clipfrac",
            "share",
            "tokens at which `critic.value_clip` binds / all",
            "Above about 0.3: the critic follows slowly; raise the clip.",
        ),
        M("critic/vpred_mean", "score", "mean value of the critic during the updates", ""),
        M(
            "critic/vf_explained_var",
            "",
            "1 - Var(returns - values) / Var(returns)",
            "Below 0 after some dozens of steps: the values are worse than a constant; use "
            "`critic.warmup_steps`, or another learning rate.",
        ),
        M(
            "critic/grad_norm",
            "",
            "norm of the critic's gradient before clipping",
            "Spikes: as the policy's.",
        ),
        M("critic/lr", "", "learning rate of the critic", ""),
    ),
    "Engine against trainer": (
        M(
            "training/rollout_probs_diff_{mean,max,std}",
            "",
            "|p_trainer - p_engine| of the sampled tokens; mean, maximum, standard deviation",
            "A mean above about 0.01 in bfloat16: engine and trainer compute different functions (templates, "
            "rotary settings, precision of the router); [fidelity.md](fidelity.md) has the remedies.",
        ),
        M(
            "training/rollout_actor_probs_pearson_corr",
            "",
            "correlation of the two probabilities over the sampled tokens",
            "Below 0.99: as above.",
        ),
        M("training/logprob_gap", "nats", "mean over tokens of |log p_trainer - log p_engine|", "As above."),
        M(
            "training/logprob_gap_limit",
            "nats",
            "limit of that mean, above which the run ends ([checks.md](checks.md))",
            "",
        ),
        M(
            "training/router_mismatch",
            "share",
            "experts that the trainer's router would have chosen otherwise / all (`training.router_replay`)",
            "",
        ),
        M("rollout_corr/{kl,k3_kl}", "nats", "k1 and k3 estimates of KL(engine || trainer)", "As above."),
        M("rollout_corr/{chi2_token,chi2_seq}", "", "mean of w^2 - 1, of tokens and of samples", "As above."),
        M(
            "rollout_corr/rollout_is_{mean,std,min,max}",
            "",
            "importance weight w = p_trainer / p_engine of tokens, before truncation",
            "A mean far from 1: the log-probs are not those of the distribution that was sampled from.",
        ),
        M(
            "rollout_corr/rollout_is_eff_sample_size",
            "share",
            "(mean w)^2 / mean w^2",
            "Below about 0.5: few tokens dominate; older samples than intended, or different numerics.",
        ),
        M(
            "rollout_corr/rollout_is_ratio_fraction_{high,low}",
            "share",
            "tokens or samples whose weight is above the bound, or below its inverse / all",
            "",
        ),
        M("rollout_corr/rollout_is_seq_{mean,std,min,max}", "", "mean weight of a sample", ""),
        M("rollout_corr/rollout_is_seq_max_deviation", "", "largest distance of that mean from 1", ""),
        M(
            "rollout_corr/rollout_is_seq_fraction_{high,low}",
            "share",
            "samples whose mean weight is above the bound, or below its inverse / all",
            "",
        ),
        M(
            "rollout_corr/{training,rollout}_{ppl,log_ppl}",
            "",
            "perplexity of the samples under trainer and engine: exp(-mean log p), and its logarithm",
            "",
        ),
        M("rollout_corr/ppl_ratio", "", "perplexity of the trainer / of the engine", "Far from 1: as above."),
        M("rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}", "nats", "logarithm of that ratio", ""),
        M("rollout_corr/weight_mean", "", "mean weight in use, after truncation", ""),
        M(
            "rollout_corr/rejected_fraction",
            "share",
            "tokens that `rollout_correction` rejects / all",
            "Above about 0.2: the difference is too large to be corrected; find its cause.",
        ),
        M(
            "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
            "share",
            "tokens rejected / all; samples that lose a token / all",
            "",
        ),
        M(
            "rollout_corr/rollout_rs_<criterion>_<statistic>",
            "",
            "statistics of one criterion of `rollout_correction.reject`, such as token_k1 and seq_mean_k3: "
            "mean, max, min, std, fraction_high, fraction_low, masked_fraction, and of the samples' means",
            "",
        ),
    ),
    "Age of samples": (
        M(
            "staleness/{mean,max}",
            "updates",
            "version of the weights that learn - version that sampled the token",
            "A maximum at the limit and a small `rollout_is_eff_sample_size`: lower `roles.lag`.",
        ),
        M(
            "carry_over/{groups,complete_groups}",
            "groups",
            "groups that wait, and those of them that are complete",
            "",
        ),
        M("carry_over/{samples,tokens}", "", "samples that continue in the next step, and their tokens", ""),
        M(
            "carry_over/dropped_groups",
            "groups",
            "groups that were too old",
            "Above 0: their tokens are lost.",
        ),
    ),
    "Validation": (
        M(
            "val-core/<source>/failed/mean@<k>",
            "share",
            "with environments: samples that count as wrong because environment or reward function failed",
            "Above 0.05: a warning is logged; the accuracy measures the environment, too.",
        ),
        M(
            "val-core/<source>/<variable>/mean@<k>",
            "",
            "mean over k samples per prompt and over the prompts of a data source; @1: greedy",
            "Falls while the reward rises: the policy exploits the reward or forgets; stop earlier, use a "
            "KL term.",
        ),
        M(
            "val-core/<source>/<variable>/{best,maj}@<k>/{mean,std}",
            "",
            "best and majority of all k samples",
            "",
        ),
        M(
            "val-aux/<source>/<variable>/{best,worst,maj}@<n>/{mean,std}",
            "",
            "best, worst and majority of n of the k samples: mean and standard deviation over subsets",
            "best@n falls while mean@k rises: the policy loses diversity.",
        ),
        M(
            "val-aux/<source>/<variable>/{mean,std}@<k>",
            "",
            "mean and standard deviation over the k samples; of other numbers of the reward function too",
            "",
        ),
        M(
            "val/{loss,perplexity}",
            "nats",
            "sft: mean of -log p over the held-out tokens with a loss, and its exponential (no unit)",
            "Rises while `sft/loss` falls: overfitting; keep the best checkpoint "
            "(`checkpoint.best_metric=val/loss`).",
        ),
        M("val-core/<source>/{loss,perplexity}", "nats", "the same of a data source", ""),
        M(f"val-aux/num_turns/{SPREAD}", "turns", "as `num_turns/*`, in validation", ""),
        M(
            "val-aux/{agents/<name>,timing_s/environments,timing_s/environments_waited}",
            "",
            "as without `val-aux/`, in validation",
            "",
        ),
    ),
    "Algorithms": (
        M("sft/loss", "nats", "mean over trained tokens of -log p", "Rises: lower the learning rate."),
        M(
            "sft/trained_share",
            "share",
            "tokens with a loss / prompt and response tokens",
            "0 or 1 where it should not be: the chat template's mask is wrong ([sft.md](sft.md)).",
        ),
        M("preference/loss", "", "loss of a pair or of a labelled sample", ""),
        M(
            "preference/accuracy",
            "share",
            "pairs of which the chosen response is preferred / all",
            "0.5: chance.",
        ),
        M(
            "preference/margin",
            "nats",
            "beta times the difference of the log-ratios of chosen and rejected responses",
            "",
        ),
        M(
            "preference/{chosen_reward,rejected_reward}",
            "nats",
            "beta times the log-ratio to the reference",
            "Both fall: the policy makes the chosen responses less likely too; add an SFT term or lower "
            "beta.",
        ),
        M("preference/{nll,log_odds_ratio}", "nats", "the two terms of ORPO", ""),
        M("preference/kl", "nats", "estimated KL divergence from the reference (KTO)", ""),
        M("preference/log_ratio", "nats", "mean absolute log-ratio to the reference (SPPO)", ""),
        M("implicit_reward/loss", "", "cross-entropy of the implicit reward model (PRIME)", ""),
        M("implicit_reward/accuracy", "share", "samples that it classifies correctly / all", "0.5: chance."),
        M("implicit_reward/reward/mean", "nats", "beta times its log-ratio, mean over tokens", ""),
        M(
            "distill/divergence",
            "nats",
            "`teacher.divergence` of policy and teacher, mean over tokens and updates",
            "Rises: lower the learning rate. Flat from the start: the policy cannot follow the teacher; "
            "compare the accuracy of both.",
        ),
        M("teacher/logprob/mean", "nats", "log-prob of the policy's tokens by their teachers", ""),
        M(
            "teacher/advantage_of_{reward,teacher}/{mean,abs}",
            "",
            "parts of the advantages, mean over tokens: by the reward, and `teacher.advantage_coef` times "
            "the log-ratio of teacher and policy; abs: mean of absolute values",
            "One abs far above the other: the smaller part has no effect; change `teacher.advantage_coef`.",
        ),
        M("implicit_reward/{grad_norm,lr}", "", "as those of the policy", ""),
        M(
            "{dapo,prime}/kept_groups",
            "groups",
            "groups with different outcomes, of which the step learns",
            "Few: the prompts are too easy or too hard; choose others.",
        ),
        M(
            "dapo/{rounds,drawn_groups}",
            "",
            "rounds of generation, and groups in them",
            "Many rounds: most groups are dropped; choose other prompts.",
        ),
    ),
    "Agents": (
        M("agents/{turns,tool_calls,rows}", "", "mean per trajectory", ""),
        M("agents/tool_errors", "calls", "calls that were answered with an error message", ""),
        M(
            "agents/failures/<cause>",
            "trajectories",
            "failed trajectories by cause: error, time, memory, lost, start, prompt, rewrite, idle",
            "Above 0: see [agents.md](agents.md); the log has each reason.",
        ),
        M(
            "agents/reopened",
            "trajectories",
            "trajectories that were repeated, because another one may have ended the process of their "
            "environment",
            "Above 0: see `agents/failures/lost`.",
        ),
        M("agents/dropped", "trajectories", "trajectories that are missing in their groups", ""),
        M("agents/dropped_groups", "groups", "groups that are left out", ""),
        M(
            "agents/rewrites",
            "turns",
            "turns after which the template changed earlier tokens",
            "Above 0: trajectories are divided into rows, or fail with `agents.on_rewrite=refuse`; use a "
            "renderer ([agents.md](agents.md)).",
        ),
        M(
            "agents/occupancy",
            "share",
            "running requests / `rollout.max_concurrent_samples`, mean over the engine's steps",
            "Low: the engine waits for environments; start more of them.",
        ),
        M(f"agents/given_length/{SPREAD}", "tokens", "tokens of tools and environments, per trajectory", ""),
    ),
    "Time": (
        M("timing_s/step", "s", "the step without validation and checkpoint", ""),
        M("timing_s/gen", "s", "generation, or the trainers' wait for samples (`roles`)", ""),
        M("timing_s/reward", "s", "scores", "A large share: more `reward.workers`, or a faster function."),
        M(
            "timing_s/{old_log_prob,ref,values,implicit_reward,teacher}",
            "s",
            "forward passes of the models",
            "",
        ),
        M("timing_s/teacher_gen", "s", "responses of the teacher (`teacher.teacher_share`)", ""),
        M("timing_s/adv", "s", "advantages", ""),
        M("timing_s/{update_actor,update_critic,update_implicit_reward}", "s", "updates of the models", ""),
        M("timing_s/update_weights", "s", "weights to the engine", ""),
        M(
            "timing_s/agreement",
            "s",
            "comparisons before the phases, with the wait for the slowest rank",
            "Large: one rank is late; see `perf/slowest_rank`.",
        ),
        M("timing_s/testing", "s", "validation", ""),
        M("timing_s/save_checkpoint", "s", "the part of a checkpoint that the run waits for", ""),
        M(
            "timing_s/{environments,environments_waited}",
            "s",
            "all requests to environments; time in which nothing else ran, summed over replicas",
            "",
        ),
        M("timing_per_token_ms/gen", "ms", "timing_s/gen / response tokens of the batch", ""),
        M(
            "timing_per_token_ms/{ref,values,adv,update_actor,update_critic}",
            "ms",
            "timing_s/* / prompt and response tokens of the batch",
            "",
        ),
    ),
    "Speed and memory": (
        M(
            "perf/throughput",
            "tokens/s per rank",
            "perf/total_num_tokens / timing_s/step / ranks",
            "Falls over the run: responses grow, or a host is slow; compare `timing_s/*`.",
        ),
        M("perf/total_num_tokens", "tokens", "prompt and response tokens of the policy's updates", ""),
        M("perf/time_per_step", "s", "timing_s/step under verl's name", ""),
        M(
            "perf/mfu/{actor,critic,actor_infer}",
            "share",
            "operations of update_actor, update_critic or old_log_prob / (their time x ranks that train x "
            "peak of dense bfloat16); operations as `rl/training/micro_batch_plans.py` counts them, without "
            "recomputation; only on GPUs of `rl/runtime/peaks.py`",
            "Below about 0.2: micro-batches are too small (`training.micro_batch_tokens`), or the "
            "pipeline idles.",
        ),
        M(
            "perf/max_memory_allocated_gb",
            "GiB",
            "peak of torch's tensors on a device, largest over ranks",
            "",
        ),
        M(
            "perf/max_memory_reserved_gb",
            "GiB",
            "peak of the memory that torch holds of a device, largest over ranks",
            "Near the device's memory: the next longer batch fails; lower `training.micro_batch_tokens`.",
        ),
        M("perf/cpu_memory_used_gb", "GiB", "memory in use on rank 0's host, by all programs", ""),
        M(
            "perf/host_memory_gib",
            "GiB",
            "resident memory of a rank's process, largest over ranks",
            "Grows in every step: a leak, often in a reward function; see `memory.host_limit_gib`.",
        ),
        M(
            "perf/slowest_rank",
            "rank",
            "rank that was latest in this step, and for which the others waited",
            "Always the same: its host is slow; see its heartbeat for the host.",
        ),
        M(
            "perf/slowest_rank_late_s",
            "s",
            "sum over phases of its arrival after the first rank, replicas of the engine included",
            "",
        ),
        M(
            "perf/idle_share_{gen,testing}/{mean,max}",
            "share",
            "share of the generation time in which a replica waits for the slowest",
            "Large: long responses at the end; see `rollout.longest_first` and "
            "[asynchrony.md](asynchrony.md).",
        ),
        M("perf/idle_share_{gen,testing}/greedy", "share", "mean share with the longest groups first", ""),
        M(
            "perf/refit_bytes_{received,local,fallback}",
            "bytes",
            "weights of a refit: sent between ranks, copied within one, loaded by the engine's own loader",
            "",
        ),
        M(
            "perf/held_bytes_{received,planned}",
            "bytes",
            "rows of held columns between ranks, as is and as planned",
            "",
        ),
        M(
            "training/imbalance",
            "share",
            "cost of the busiest data parallel rank / mean - 1",
            "Above about 0.1: a few long samples; fewer or larger mini-batches.",
        ),
        M("training/micro_batch_imbalance", "share", "the same of micro-batches", ""),
        M(
            "training/{micro_batches,empty_micro_batches}",
            "",
            "micro-batches of a rank; those without a sample",
            "",
        ),
    ),
    "Run": (
        M("training/global_step", "steps", "number of the step; 0: the validation before training", ""),
        M("training/epoch", "epochs", "prompts drawn so far / prompts of the training data", ""),
    ),
}
"""Title -> metrics."""


@cache
def _patterns() -> tuple[tuple[re.Pattern, Metric], ...]:
    return tuple((re.compile(each.pattern), each) for rows in METRICS.values() for each in rows)


def find(name: str) -> Metric | None:
    """Return the first entry of a metric's name, None if it is not documented."""
    return next((each for pattern, each in _patterns() if pattern.fullmatch(name)), None)


def alternatives() -> list[str]:
    """Return the names of the table, one for each alternative of `{a,b}`; `<x>` stays."""
    names = []
    for metric in (metric for rows in METRICS.values() for metric in rows):
        parts = re.split(r"\{([^}]*)\}", metric.name)
        choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in product(*choices)]
    return names


def undocumented(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name != "time" and find(name) is None)


def table() -> str:
    """Return the tables of the page."""
    lines: list[str] = []
    for title, rows in METRICS.items():
        lines += [
            "",
            f"### {title}",
            "",
            "| metric | unit | formula | a bad value |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{each.name}` | {each.unit} | {_cell(each.formula)} | {_cell(each.bad)} |" for each in rows
        ]
    return "\n".join(lines[1:])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_table(page: str) -> str:
    """Return the page with its table up to date."""
    return MARK.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
