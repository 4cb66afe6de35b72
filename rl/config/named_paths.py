"""The files and directories that a config names and its run reads, with their keys."""

from collections.abc import Iterator
from pathlib import Path

from rl.config.needs import learns, needs_engine, needs_reward, validates
from rl.config.options import ConfigError
from rl.config.reward_sources import check_sources
from rl.config.run_models import run_models
from rl.config.schema import Config


def absent_paths(config: Config) -> list[str]:
    """Return a line for each path that the run reads and that is not on this machine.

    Raises ConfigError for a user's file here that is not Python.
    """
    lines: dict[str, None] = {}
    for key, path in _inputs(config):
        if not path.exists():
            lines[f"not on this machine: {key}={path}; the run refuses to start without it"] = None
        elif path.suffix == ".py" and not (key.startswith("agents.") and config.agents.interpreter):
            try:
                compile(path.read_bytes(), path, "exec")
            except (SyntaxError, ValueError) as error:  # ValueError: it holds a null byte
                raise ConfigError(
                    f"{key}={path} cannot be imported: {type(error).__name__}: {error}; correct the file."
                ) from error
    return [*lines]


def users_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the key and the .py file of each user's algorithm, advantage, loss, reward, parser, curriculum,
    environment and tool, also if it does not exist."""
    specs = [("data.curriculum", config.data.curriculum), ("algorithm", f"{config.algorithm}:")]
    specs += [("reward.judge.parser", config.reward.judge.parser)]
    specs += [("reward.function", config.reward.function)]
    specs += [("objective.advantage", config.objective.advantage), ("objective.loss", config.objective.loss)]
    for spec in (config.agents.plan.default, *config.agents.plan.sources.values()):
        specs += [(f"{spec.key}.environment", spec.environment)]
        specs += [(tool.key, tool.function) for tool in spec.tools]
    sources = check_sources(config.reward.sources).values()
    specs += [(f"{part.key}.function", part.function) for parts in sources for part in parts]
    files = ((key, spec.rpartition(":")[0]) for key, spec in specs)
    return ((key, Path(file)) for key, file in files if file.endswith(".py"))


def _inputs(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the key and the path of each data file, model and user's file that the run reads."""
    trains, scores = learns(config), needs_reward(config)
    unread: tuple[str, ...] = () if trains else ("data.curriculum",)
    unread += () if scores and config.reward.judge.path else ("reward.judge.parser",)
    unread += () if scores else ("reward.function", "reward.sources")
    for name in ("train",) * trains + ("val",) * validates(config):
        yield from ((f"data.{name}", Path(file)) for file in getattr(config.data, name))
    for model in run_models(config).values():
        if model.own_path or model.name == "policy":
            yield model.key, Path(model.path)
    drafts = config.rollout.draft.path if needs_engine(config) else ""
    for key, path in (("rollout.draft.path", drafts), ("adapter.path", config.adapter.path)):
        if path:
            yield key, Path(path)
    yield from ((key, file) for key, file in users_files(config) if not key.startswith(unread))
