"""Counts the lines of code whose only purpose is auditing: without checks they would not exist.

    python -m tests.museum --lines        lines by file, and their sum

Counted are whole files, and functions, classes and constants of other files (AUDITS). A function that also
does the work of the run is not counted (MIXED). tests/unit/checks/test_audit_lines.py finds a function that
raises an error of a check and is in neither list.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
AUDITS: dict[str, tuple[str, ...]] = {
    **{str(path.relative_to(ROOT)): () for path in sorted((ROOT / "rl" / "checks").glob("*.py"))},
    "rl/checkpoint/contents.py": ("in_words",),
    "rl/checkpoint/start.py": (),
    "rl/checkpoint/store.py": ("WronglyLoaded", "_check_loaded"),
    "rl/checkpoint/hf.py": ("WronglyExported", "differing", "raise_problem", "_problem"),
    "rl/data/contexts.py": ("check_context",),
    "rl/data/patches_again.py": (),
    "rl/data/reading.py": ("num_rows", "row_bytes"),
    "rl/data/responses_again.py": (),
    "rl/faults/agreement.py": ("check_replicas", "check_master_weights"),
    "rl/features/adapters/layers.py": ("AdapterSum.has_constant_lengths",),
    "rl/features/adapters/trainer.py": (
        "SUM_ERROR",
        "COMPARED_ROWS",
        "EXACT",
        "WrongLearning",
        "Adapters.check",
        "Adapters.wrong_values",
        "Adapters._check_draws",
        "Adapters._check_principal",
    ),
    "rl/features/agents/chat.py": ("Chat.find_strange",),
    "rl/features/agents/environment.py": ("task_digest",),
    "rl/features/agents/session.py": (
        "WrongAnswer",
        "Session.check_answer",
        "Session.check_outcome",
        "Session.check_context",
    ),
    "rl/features/carry_over/check.py": (),
    "rl/features/drafts/check.py": (),
    "rl/features/drafts/drafts.py": ("WrongDistribution", "Drafts.check"),
    "rl/features/roles/link.py": ("Link.check_weights",),
    "rl/features/router_replay/trainer.py": ("WrongRoutes", "MAX_MISMATCH", "RouterReplay.check"),
    "rl/features/drafts/mtp.py": ("_check_target",),
    "rl/features/teachers/divergence.py": ("NUM_COMPARED", "TeacherTargets.check", "Targets.logprobs"),
    "rl/features/teachers/teaching.py": ("NUM_COMPARED", "Teaching._second", "Teaching._check_targets"),
    "rl/features/transformers_backend/shards.py": ("check_sums", "Shards.note_reduced"),
    "rl/phases/draw.py": ("Draw._check_order", "Draw.check_cursor"),
    "rl/refit/equality.py": (),
    "rl/refit/gather.py": ("RefitMismatch", "differences", "raise_mismatches"),
    "rl/refit/refit.py": ("check_refit", "check_weights", "what_is_equal", "_comparable"),
    "rl/rollout/calls.py": ("Live.check_versions",),
    "rl/rollout/batches.py": ("SamplesDiffer", "_check_numbers", "_check_digests"),
    "rl/rollout/router.py": ("SCORE_ERROR", "CoarseRouter", "probe", "is_coarse", "check"),
    "rl/runtime/collectives.py": ("gather_texts",),
    "rl/runtime/names.py": (),
    "rl/training/audit.py": (),
    "rl/training/gradients.py": (
        "NORM_TOLERANCE",
        "ADDED",
        "COPIES",
        "ELEMENTS",
        "WrongReduction",
        "StateChanged",
        "Watched",
        "ReductionProbe",
        "counted_parameters",
        "num_not_zero",
        "clipped_norms",
        "check_clipped",
    ),
    "rl/training/optimizer.py": (
        "DEVIATE",
        "SAMPLED",
        "RELATIVE",
        "WrongStep",
        "StateSample",
        "_is_biased",
        "_every",
        "_adamw",
    ),
}
"""File -> names of functions, classes and constants that only audit; none: the whole file."""
MIXED = {
    "rl/checkpoint/directory.py:read_manifest",
    "rl/checkpoint/shards.py:reading",
    "rl/checkpoint/shards.py:check_file",
    "rl/checkpoint/store.py:CheckpointStore.load",
    "rl/checkpoint/store.py:_read_on_rank_0",
    "rl/faults/agreement.py:PhaseAgreement.check",
    "rl/features/early_stop/early_stop.py:EarlyStop._note",
    "rl/features/roles/generators.py:Generators._compare_logs",
    "rl/features/roles/link.py:Link.receive_weights",
    "rl/features/roles/trainer_side.py:GenerationByRoles._check_groups",
    "rl/features/router_replay/trainer.py:RouterReplay.metrics",
    "rl/features/vision/tower.py:VisionTower._seen",
    "rl/features/vision/tower.py:_images_of",
    "rl/features/vision/tower.py:_pixels_of",
    "rl/phases/draw.py:Draw.next",
    "rl/phases/reward_shaping.py:KlPenalty.apply",
    "rl/refit/refit.py:_prove_description",
    "rl/refit/refit.py:plan_weights",
    "rl/training/engine.py:TrainingEngine._step",
}
"""Functions that raise an error of a check beside other work."""
SHARED = {"expect", "refuse", "raise_mismatches", "raise_problem", "_check_coef", "_compare"}
"""Functions that raise the errors of several checks."""


def definitions(path: Path) -> Iterator[tuple[str, ast.stmt, int, int]]:
    """Yield (name, node, first line, last line) of the functions, classes and constants of a file.

    A string after a constant, its documentation, belongs to the constant.
    """

    def of(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt, int, int]]:
        for node, after in zip(body, [*body[1:], None]):
            last = node.end_lineno or node.lineno
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets[0] if isinstance(node, ast.Assign) else node.target
                names = [n.id for n in ast.walk(targets) if isinstance(n, ast.Name)]
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    last = after.end_lineno or last
                yield (prefix + names[0] if names else "", node, node.lineno, last)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                yield (prefix + node.name, node, first, last)
                if isinstance(node, ast.ClassDef):
                    yield from of(node.body, f"{prefix}{node.name}.")

    yield from of(ast.parse(path.read_text()).body, "")


def counted() -> dict[str, int]:
    """Return file -> number of lines that only audit. Raises KeyError for a name that a file lacks."""
    found = {}
    for file, names in AUDITS.items():
        if not names:
            found[file] = len((ROOT / file).read_text().splitlines())
            continue
        spans = {name: last - first + 1 for name, _, first, last in definitions(ROOT / file)}
        found[file] = sum(spans[name] for name in names)
    return found


def raised_in(log: str) -> tuple[str, int]:
    """Return the check that raised a log's error, as file:function, and its number of lines; or ("", 0)."""
    for file, line in reversed(re.findall(r'File ".*?/(rl/[\w/]+\.py)", line (\d+)', log)):
        found = [
            (name, last - first + 1)
            for name, node, first, last in definitions(ROOT / file)
            if isinstance(node, ast.FunctionDef) and first <= int(line) <= last and node.name not in SHARED
        ]
        own = AUDITS.get(file, ("",))
        if found and (not own or any(f"{found[-1][0]}.".startswith(f"{name}.") for name in own)):
            return f"{file}:{found[-1][0]}", found[-1][1]
    return "", 0
