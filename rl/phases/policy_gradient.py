"""The policy gradient that a configuration names, composed of the pure functions in `rl.objectives`.

An algorithm's file calls `advantages(batch, config)` and `policy_loss(config)`; `objective.advantage`,
`objective.loss` and `objective.aggregation` choose the formulas. Each formula is one function, in a file of
`rl.objectives` or in a user's file, and its parameters name its inputs. Positional parameters are columns of
the batch, keyword-only parameters are keys of the section `objective`. For example, `rloo(rewards, groups)`
reads two columns and no key. `rl.config.objective_checks` rejects combinations that do not fit together.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rl.checks.objective import check_loss
from rl.config.functions import UsersError, call, check_parameters, companion, load_function
from rl.config.objective import Objective
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.config.terms import AdaptiveEntropy
from rl.data.batch import COLUMNS, Batch
from rl.objectives import top_entropy
from rl.objectives.aggregate import aggregate
from rl.objectives.filtration import sample_weights
from rl.objectives.kl import kl
from rl.objectives.off_policy_mask import off_policy_mask
from rl.objectives.segments import expand
from rl.training.logprobs import OUTPUTS
from rl.training.loss import Loss, TokenSelection, Totals
from rl.training.packing import MicroBatch
from rl.workers.messages import shown


def check_formulas(objective: Objective) -> None:
    """Raise ConfigError if an advantage or a loss in a user's file reads what no batch has."""
    of_loss = {name for name, column in COLUMNS.items() if column.in_loss} | {*OUTPUTS}
    for name, accepted in {"advantage": {*COLUMNS, "score_details"}, "loss": of_loss}.items():
        spec, key = getattr(objective, name), f"objective.{name}"
        if ".py:" in spec:
            check_parameters(load_function(spec, key=key), accepted | {"lengths"}, key=f"{key}={spec}")


def advantages(batch: Batch, config: Config) -> Tensor:
    """Return the advantage of every token of the batch, computed as `objective.advantage` says, float32 [T].

    A trajectory of several rows is one sample. Two formulas require the results of another model: gae those
    of a critic, and prime those of an implicit reward model. `rl/algorithms/ppo.py` therefore calls gae
    directly, and `rl/algorithms/prime.py` calls prime.
    """
    estimator, _ = config.objective.chosen
    assert estimator is not None, "the algorithm has no policy gradient"
    function = load_function(estimator.spec, key="objective.advantage")
    samples = batch.merge_rows()
    is_per_token, key = "lengths" in estimator.columns, f"objective.advantage={config.objective.advantage}"
    try:
        result = _result(function, arguments(function, samples, config), spec=estimator.spec, key=key)
    except ValueError as error:
        if isinstance(error, UsersError):
            raise
        raise ConfigError(f"{key}: {error}") from error
    size = int(samples.lengths.sum()) if is_per_token else len(samples)
    _check_numbers(result, size, of=f"{key} must return an advantage per {('sample', 'token')[is_per_token]}")
    return result if is_per_token else expand(result, samples.lengths)


def filtered(batch: Batch, config: Config) -> dict[str, Tensor]:
    """Return the column `sample_weights` of `objective.filtration`, [T]; no column if it is none.

    A trajectory of several rows is one sample.
    """
    if config.objective.filtration == "none":
        return {}
    weights = sample_weights(**arguments(sample_weights, batch.merge_rows(), config))
    return {"sample_weights": expand(batch.of_trajectories(weights), batch.lengths)}


def policy_loss(config: Config) -> Loss:
    """Return the loss for `Phases.update`: `objective.loss` with its mean, KL term and entropy bonus."""
    goal = config.objective
    _, loss = goal.chosen
    assert loss is not None, "the algorithm has no policy gradient"
    function = load_function(loss.spec, key="objective.loss")
    inputs = set(inspect.signature(function).parameters)
    if goal.entropy_coef:
        inputs.add("entropy")
    # `with_entropy_bonus` adds an adaptive entropy bonus.
    checked = replace(config, objective=replace(goal, adaptive_entropy=AdaptiveEntropy()))
    return Loss(
        partial(_policy_loss, config=config, token_loss=function),
        reads=tuple(name for name in OUTPUTS if name == "logprobs" or name in inputs),
        check=partial(
            check_loss, goal.loss, partial(_policy_loss, config=checked, token_loss=function), checked
        ),
    )


def with_entropy_bonus(loss: Loss, config: Config, coef: float) -> Loss:
    """Return the loss minus `coef` times the mean entropy. `objective.aggregation` defines the mean."""

    def function(micro: MicroBatch, totals: Totals, **values: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = loss.function(micro, totals, **values)
        return value - coef * _reduction(micro, totals, config)(micro.entropy), metrics

    reads = None if loss.reads is None else tuple(dict.fromkeys((*loss.reads, "entropy")))
    return replace(loss, function=function, reads=reads)


def token_selection(config: Config) -> TokenSelection | None:
    """Return the selection of tokens that the loss treats differently; None if all tokens are equal."""
    _, loss = config.objective.chosen
    assert loss is not None, "the algorithm has no policy gradient"
    select: Callable[..., Tensor] | None
    if config.objective.top_entropy < 1:
        select, output = top_entropy.select_tokens, "entropy"
    else:
        select, output = companion(loss.spec, "select_tokens"), "logprobs"
    if select is None:
        return None

    def selected(batch: Batch, values: Tensor, seed: int) -> Tensor:
        return select(**arguments(select, batch, config, **{output: values}, seed=seed))

    return TokenSelection(selected, output)


def arguments(
    function: Callable, columns: Batch | MicroBatch, config: Config, **given: Any
) -> dict[str, Any]:
    """Return the arguments of a function of `rl.objectives` by name.

    A positional parameter gets the column of its name, a keyword-only parameter the key of its name in the
    section `objective`. Values in `given` take precedence. A parameter without column or key keeps its
    default.
    """
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_key = parameter.kind is parameter.KEYWORD_ONLY
        value = given.get(name)
        if value is None:
            value = config.objective.option(name) if is_key else columns.named(name)
        if value is not None:
            found[name] = value
        elif parameter.default is parameter.empty:
            what = "a key of the section objective" if is_key else f"filled by algorithm={config.algorithm}"
            raise ValueError(f"{function.__name__} reads {name}, which is not {what}; provide it first.")
    return found


def _result(function: Callable, given: Mapping[str, Any], *, spec: str, key: str) -> Any:
    """Return the result of a formula. Raises UsersError for an exception in a user's file."""
    return call(partial(function, **given), key=key) if ".py:" in spec else function(**given)


def _check_numbers(found: Any, size: int, *, of: str) -> None:
    """Raise UsersError unless a formula's result is a floating tensor [size]."""
    if not (isinstance(found, Tensor) and found.is_floating_point() and found.shape == (size,)):
        raise UsersError(f"{of}, a floating tensor of shape [{size}], not {shown(found)}.")


def _policy_loss(
    micro: MicroBatch, totals: Totals, *, config: Config, token_loss: Callable
) -> tuple[Tensor, dict[str, Tensor]]:
    goal, reduce = config.objective, _reduction(micro, totals, config)
    _, formula = goal.chosen
    assert formula is not None, "policy_loss checks it"
    key = f"objective.loss={goal.loss}"
    result = _result(token_loss, arguments(token_loss, micro, config), spec=formula.spec, key=key)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise UsersError(f"{key} must return (losses, dict of sums over tokens), not {shown(result)}.")
    losses, stats = result
    _check_numbers(losses, len(micro.mask), of=f"{key} must return a loss per token first")
    if "loss_weights" in micro.columns and "loss_weights" not in formula.columns:
        losses = losses * micro.columns["loss_weights"]
    if "sample_weights" in micro.columns:
        losses = losses * micro.columns["sample_weights"]
    if goal.top_entropy < 1:
        losses = losses * micro.column("selected_tokens")
    if goal.off_policy_mask:
        sampling = micro.columns.get("rollout_logprobs", micro.column("old_logprobs"))
        pair, of_samples = (micro.logprobs, sampling), (micro.column("advantages"), micro.mask, micro.lengths)
        unmasked = off_policy_mask(*pair, *of_samples, bound=goal.off_policy_mask)
        losses = losses * unmasked
        stats["off_policy_masked_fraction"] = (1 - unmasked).sum()
    total = pg_loss = reduce(losses)
    metrics = {"actor/pg_loss": pg_loss} | {
        f"actor/{name}": value / totals.num_tokens for name, value in stats.items()
    }
    if goal.kl_coef:
        both = micro.logprobs, micro.column("ref_logprobs")
        old = micro.column("old_logprobs")
        kl_loss = reduce(kl(*both, micro.mask, estimator=goal.kl_estimator, old_logprobs=old))
        total = total + goal.kl_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss
    if goal.entropy_coef and not goal.adaptive_entropy.target:
        total = total - goal.entropy_coef * reduce(micro.entropy)
    return total, metrics


def _reduction(micro: MicroBatch, totals: Totals, config: Config) -> Callable[[Tensor], Tensor]:
    """Return a function that averages numbers per token [T] as `objective.aggregation` says."""
    return partial(
        aggregate,
        mask=micro.mask,
        lengths=micro.lengths,
        mode=config.objective.aggregation,
        num_tokens=totals.num_tokens,
        num_samples=totals.num_samples,
        norm=config.rollout.max_response_tokens,
        counts=micro.columns.get("trajectory_tokens"),
    )
