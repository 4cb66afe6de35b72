"""The text that a dry run prints."""

import argparse
from collections.abc import Iterable
from dataclasses import replace

from rl.dry_run.asynchrony import best, forms
from rl.dry_run.changes import Change
from rl.dry_run.check_seconds import check_seconds
from rl.dry_run.estimate import Estimate
from rl.dry_run.generation import seconds_between_nodes
from rl.dry_run.hardware import GIB
from rl.dry_run.images import images_of
from rl.dry_run.parameters import count_parameters, count_stages
from rl.dry_run.rows import num_micro_batches
from rl.dry_run.timing import idle_share

LEAST_STEP_S = 1.0
"""Shortest estimated step for which forms of asynchrony are compared, in seconds. Launches of kernels and
Python, which the estimate leaves out, determine shorter ones."""

PHASES = ("training", "refit", "generation")


def report(estimate: Estimate) -> str:
    """Return the whole report except the verdict."""
    return "\n\n".join((_head(estimate), _stages(estimate), _memory(estimate), _work(estimate)))


def verdict(estimate: Estimate, change: Change | None) -> str:
    """Return FITS, or the problems and the cheapest change that solves them."""
    if not estimate.problems:
        peak = max(estimate.memory.peak(phase)[0] for phase in _phases(estimate))
        return f"FITS, with {(estimate.hardware.memory - peak) / GIB:.1f} GiB to spare"
    advice = "none of the changes tried fits; use more GPUs, or GPUs with more memory"
    if change is not None:
        seconds = change.estimate.step_seconds - estimate.step_seconds
        advice = f"cheapest change that fits: {change.words(estimate)}"
        if estimate.hardware.has_speeds:
            advice += f"  ({seconds:+.0f} s per step)"
    return "\n".join(["DOES NOT FIT", *(f"  {line}" for line in (*estimate.problems, advice))])


def report_forms(estimate: Estimate, arguments: argparse.Namespace) -> str:
    """Return the seconds of a step in each form of asynchrony, and which one to use.

    arguments: the options of `rl.dry_run.command`.
    """
    sigma, measured = arguments.sigma_response_tokens, (arguments.generation_seconds, arguments.rest_seconds)
    found = forms(estimate, sigma=sigma, generation_s=measured[0], rest_s=measured[1])
    if not all(measured) and found[0].seconds < LEAST_STEP_S:
        return (
            f"forms of asynchrony: no advice for steps below {LEAST_STEP_S:g} s, whose seconds the model's "
            "size does not determine; measure --generation-seconds and --rest-seconds (docs/asynchrony.md)"
        )
    basis = "measured seconds" if all(measured) else "estimated rates, rough; measured seconds are better"
    rows = [
        [form.name, f"{form.seconds:.0f} s", f"x {found[0].seconds / form.seconds:.2f}"] for form in found
    ]
    chosen = best(found)
    advice = f"use {chosen.name}" if chosen.overrides else "keep synchronous: no other form is much faster"
    if "rollout_correction.truncate_tokens" in chosen.overrides:
        advice += " (or another correction of older samples)"
    return "\n".join(
        [
            f"forms of asynchrony by {basis}, with log-normal responses of sigma {sigma:g} and of the mean "
            "above (docs/asynchrony.md)",
            _aligned(rows),
            advice,
        ]
    )


def _phases(estimate: Estimate) -> tuple[str, ...]:
    return PHASES if estimate.memory.engine else PHASES[:1]


def _head(estimate: Estimate) -> str:
    config, layout, hardware = estimate.config, estimate.layout, estimate.hardware
    nodes = -(-layout.num_ranks // hardware.ranks_per_node)
    grid = f"tp {layout.tp} x pp {layout.pp}{f' in {layout.vpp} chunks' if layout.vpp > 1 else ''}"
    grid += f"{f' x cp {layout.cp}' if layout.cp > 1 else ''} x dp {layout.dp}"
    if layout.shard > 1:
        grid += f"; each copy of the weights on {layout.shard} ranks"
    if estimate.models["policy"].num_experts:
        grid += f"; experts: ep {layout.ep} x etp {layout.etp} x dp {layout.expert_dp}"
    lines = [
        f"{config.run.name}: {config.algorithm}, {layout.num_ranks} ranks on {_count(nodes, 'node')}, "
        f"{'CPUs with' if hardware.is_cpu else 'GPUs of'} {hardware.memory_gib:g} GiB, {config.model.dtype}"
    ]
    for model in estimate.models.values():
        words = f"{model.parameters / 1e9:.2f} B parameters" + ("" if model.run.learns else ", frozen")
        if model.num_experts:
            words += f", {model.multiplied / 1e9:.1f} B of them active per token"
        lines.append(f"{model.run.name:<16}{words}")
    adapter, policy = config.adapter, estimate.models["policy"]
    if policy.adapters:
        learned = count_parameters(policy.adapter_parts)
        lines.append(
            f"{'adapter':<16}{adapter.kind} of rank {adapter.rank}: {learned / 1e6:,.1f} M parameters learn, "
            f"{100 * learned / policy.parameters:.2f} %"
            + (f", in each of {estimate.points} points" if estimate.points > 1 else "")
        )
    lines.append(f"{'training':<16}{grid}")
    if estimate.memory.engine:
        words = f"{_count(layout.replicas, 'replica')} of tp {layout.rollout_tp}"
        if layout.rollout_ep > 1:
            words += f"; whole experts over ep {layout.rollout_ep}"
        lines.append(f"{'generation':<16}{words}")
    return "\n".join(lines + [f"note: {note}" for note in estimate.notes])


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("s" if number != 1 else "")


def _stages(estimate: Estimate) -> str:
    """Return parameters and training peak of each pipeline stage; equal consecutive stages share a line."""
    counts = {
        name: count_stages(model.parts, estimate.layout.placement(model))
        for name, model in estimate.models.items()
        if model.run.on_training_grid
    }
    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for stage, memory in enumerate(estimate.memory.stages):
        cells = (
            str(counts["policy"][stage].num_layers),
            *(f"{count[stage].parameters:,}" for count in counts.values()),
            *(f"{part / GIB:.2f}" for part in (memory.state, memory.activations, memory.head)),
        )
        if rows and rows[-1][2] == cells:
            rows[-1] = (rows[-1][0], stage, cells)
        else:
            rows.append((stage, stage, cells))
    titles = ["stage", "layers", *(f"{name} parameters" for name in counts)]
    titles += ["state GiB", "activations GiB", "head GiB"]
    table = [titles] + [[str(a) if a == b else f"{a}-{b}", *cells] for a, b, cells in rows]
    return "parameters of one rank, and its training memory\n" + _aligned(table)


def _memory(estimate: Estimate) -> str:
    """Return the table of GiB by kind, at the fullest stage of each phase."""
    memory, phases = estimate.memory, _phases(estimate)
    worst = {phase: memory.stages[memory.peak(phase)[1]] for phase in phases}
    rows = [[f"GiB of a {'rank' if memory.hardware.is_cpu else 'GPU'}", *phases]]
    for name in memory.stages[0].states:
        for kind in ("weights", "gradients", "optimizer"):
            values = [getattr(memory.stays(phase, worst[phase].states[name]), kind) for phase in phases]
            if any(values):
                rows.append([f"{name}: {kind}", *_gib(values)])
    zero = [0.0] * (len(phases) - 1)
    rows.append(["activations", *_gib([worst["training"].activations, *zero])])
    rows.append(["log-prob head", *_gib([worst["training"].head, *zero])])
    if engine := memory.engine:
        idle = memory.idle_engine("training")
        rows.append(["engine: weights", *_gib([idle, engine.weights, engine.weights])])
        if engine.staged:
            rows.append(["engine: staged weights", *_gib([0.0, engine.staged, 0.0])])
        rows.append(["engine: activations", *_gib([0.0, 0.0, engine.workspace])])
        rows.append(["engine: KV cache", *_gib([0.0, 0.0, max(0.0, engine.cache - engine.unused)])])
        rows.append(["refit buffers", *_gib([0.0, memory.refit_buffers, 0.0])])
    if memory.connections:
        rows.append(["refit: NCCL", *_gib([memory.connections] * len(phases))])
    if memory.communicators:
        rows.append(["NCCL communicators", *_gib([memory.in_communicators] * len(phases))])
    for name, frozen in memory.frozen.items():
        rows.append([f"{name}'s engine", *_gib([memory.of_frozen(frozen)] * len(phases))])
    rows.append(["reserve", *_gib([memory.hardware.reserve] * len(phases))])
    peaks = [memory.peak(phase) for phase in phases]
    rows.append([f"total of {memory.hardware.memory_gib:g}", *_gib([total for total, _ in peaks])])
    rows.append(["on stage", *(str(stage) for _, stage in peaks)])
    lines = [_aligned(rows)]
    if engine:
        at_once = engine.cache_tokens // engine.max_tokens
        lines.append(
            f"KV cache: {engine.cache_tokens:,} tokens, {at_once:,} sequences of the longest "
            f"{engine.max_tokens:,}"
        )
    used = {
        f"offloaded during generation (training.offload={estimate.config.training.offload})": memory.away,
        "for reference weights": memory.reference,
        "for the optimizer's state (host_share)": memory.optimizer_in_host,
        "for the KV cache of ended turns": estimate.config.rollout.kv_offload_gib * GIB,
    }
    if any(used.values()):
        per_rank = sum(used.values()) / GIB
        lines.append(
            f"host memory: {per_rank:.1f} GiB per rank, {per_rank * memory.hardware.ranks_per_node:.0f} GiB "
            f"per node: {', '.join(f'{size / GIB:.1f} {words}' for words, size in used.items() if size)}"
        )
    return "\n".join(lines)


def _gib(values: Iterable[float]) -> list[str]:
    return [f"{value / GIB:.2f}" if value else "-" for value in values]


def _work(estimate: Estimate) -> str:
    """Return tokens, bytes of the refit, seconds by phase, and the assumptions behind them."""
    lengths, hardware, sequences = estimate.lengths, estimate.hardware, estimate.sequences
    lines = [
        f"tokens per step: at most {estimate.max_tokens:,}; about {round(sequences * lengths.total):,} in "
        f"{sequences:,} sequences of {lengths.prompt:g} + {lengths.response:g} tokens"
    ]
    ranks = max(estimate.layout.rollout_tp, estimate.layout.rollout_ep)
    nodes = -(-ranks // hardware.ranks_per_node)
    if nodes > 1 and (engine := estimate.memory.engine):
        config, layout = estimate.config, estimate.layout
        lost = seconds_between_nodes(config, layout, estimate.models, engine, lengths, hardware)
        lines.append(
            f"generation: {ranks} ranks on {nodes} nodes hold the weights; every layer's messages between "
            f"them take about {lost:.0f} s of gen"
        )
    if images := images_of(estimate.config, estimate.models["policy"], lengths):
        lines.append(
            f"images: at most {images.tokens:,} tokens of a prompt, {images.pixels:,} pixels; the tower "
            f"takes {images.operations / 1e9:,.0f} GFLOP for them, and samples of a step hold "
            f"{3 * images.pixels * estimate.sequences / GIB:.2f} GiB of pixels"
        )
    if refit := estimate.refit:
        lines.append(
            f"refit: {refit.all_ranks / GIB:.1f} GiB received by all ranks, at most "
            f"{refit.busiest / GIB:.2f} GiB by one, from at most {refit.senders} ranks, "
            f"{refit.largest_batch / GIB:.2f} GiB of buffers"
        )
    if other := estimate.other_refit:
        form = "merged" if estimate.config.adapter.in_engine == "adapter" else "adapter"
        lines.append(
            f"refit with adapter.in_engine={form}: {other.all_ranks / GIB:.1f} GiB received by all ranks, at "
            f"most {other.busiest / GIB:.2f} GiB by one, {other.seconds:.2f} s"
        )
    if estimate.layout.pp > 1:
        lines.append(_pipeline(estimate))
    if not hardware.has_speeds:
        lines.append("seconds: not estimated, because --tflops and the other speeds are a GPU's")
        return "\n".join(lines)
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in estimate.seconds.items())
    first, later = (100 * each / estimate.step_seconds for each in check_seconds(estimate))
    lines += [
        f"seconds per step, estimated: {phases}; together {estimate.step_seconds:.0f}",
        f"of that checks (docs/checks.md): {later:.2g} %, and {first:.2g} % of the first step",
        f"of that idle: {', '.join(_idle(estimate))}",
        f"GPU-hours of {estimate.config.run.max_steps} steps: {estimate.gpu_hours:,.1f}",
        f"assumed: {hardware.speeds}, {hardware.tflops:g} TFLOP/s x {hardware.train_share:g}, "
        f"{hardware.hbm_gb_s:g} GB/s of HBM x {hardware.hbm_share:g}, "
        f"links {hardware.nvlink_gb_s:g} / {hardware.nic_gb_s:g} GB/s x {hardware.link_share:g}, "
        f"busiest experts x {hardware.expert_imbalance:g}, "
        f"{hardware.reserve_gib:g} GiB in reserve and {hardware.communicator_gib:g} for each of "
        f"{estimate.memory.communicators} NCCL communicators (public figures, not measured here); see "
        "--dry-run --help",
    ]
    return "\n".join(lines)


def _idle(estimate: Estimate) -> list[str]:
    """Return the idle seconds and shares of generation and of the passes through a pipeline."""
    passes = set(estimate.idle) - {"gen"}
    found = []
    for words, phases in (
        ("waiting for the longest response", {"gen"}),
        ("for other pipeline stages", passes),
    ):
        seconds = sum(estimate.idle.get(name, 0.0) for name in phases)
        all_seconds = sum(estimate.seconds.get(name, 0.0) for name in phases)
        if all_seconds:
            found.append(f"{seconds:.1f} s {words}, {seconds / all_seconds:.0%}")
    return found


def _pipeline(estimate: Estimate) -> str:
    """Return the idle share of the pipeline, and the idle share of a plain schedule, or of two chunks per
    stage."""
    config, layout, lengths = estimate.config, estimate.layout, estimate.lengths
    layers = min(model.num_layers for model in estimate.models.values() if model.run.on_training_grid)
    other = 1 if layout.vpp > 1 else 2
    number = num_micro_batches(config, layout, lengths.total)
    line = (
        f"pipeline: {number} micro-batch{'es' if number > 1 else ''} per mini-batch, idle "
        f"{100 * idle_share(config, layout, lengths):.0f} % of its work"
    )
    if layout.pp * other <= layers:
        share = idle_share(config, replace(layout, vpp=other), lengths)
        line += f"; with training.vpp={other} {100 * share:.0f} %"
    return line


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
