"""The checkpoints of a run: which checkpoint to continue from, and what a checkpoint holds besides models."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rl.checkpoint.hf import export_hf
from rl.checkpoint.rng import reseed_rng
from rl.checkpoint.start import Start, check_controllers, check_loaded, check_restored
from rl.checkpoint.store import CheckpointStore, Saved
from rl.checks.model_files import check_function, wrong_export
from rl.config.needs import learns
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.phases.phases import Phases
from rl.rollout.sampling import seed_of
from rl.run.changes import check_changes, contents
from rl.run_directory.status import Status


def find_checkpoint(config: Config, store: CheckpointStore) -> tuple[Saved | None, Saved | None]:
    """Return the run's newest checkpoint, and the checkpoint that checkpoint.resume names if it must be read.

    Raises ConfigError, before any model is built:

    - if checkpoint.resume=never and run.dir holds checkpoints of an earlier run. Retention and the next
      resume would treat them as checkpoints of this run. A run that began with `never` continues. For
      example, Slurm starts the same command again after a requeue.
    - if the checkpoints of run.dir belong to another run (`rl.run.changes`).
    - if the checkpoint that checkpoint.resume names is already at run.max_steps, so no step would be trained.
    """
    newest, resume = store.newest(), config.checkpoint.resume
    written = {} if newest is None else store.config_of(newest)
    before = written["checkpoint"]["resume"] if written and resume != "auto" else ""
    if resume == "never" and newest is not None and before != "never":
        raise ConfigError(
            f"checkpoint.resume=never, but {store.directory} holds checkpoints of an earlier run; "
            "set checkpoint.resume=auto to continue it, or another run.dir."
        )
    if newest is not None:
        check_changes(config, written, str(newest.path))
    if not learns(config) or resume in ("auto", "never"):
        return newest, None
    if newest is not None and not config.checkpoint.weights_only:
        return newest, None
    # The run that `resume` names may have saved again since this run began.
    named = store.named(before if Path(before).is_relative_to(resume) else resume)
    if newest is None and not config.checkpoint.weights_only and named.step >= config.run.max_steps:
        raise ConfigError(
            f"checkpoint.resume={resume} is at step {named.step}, but run.max_steps={config.run.max_steps} "
            "counts all steps, so nothing would be trained; raise run.max_steps, or set "
            "checkpoint.weights_only=true to begin at step 0 with its weights."
        )
    store.config = replace(config, checkpoint=replace(config.checkpoint, resume=str(named.path)))
    return newest, named


class RunCheckpoints:
    """Reads and writes the checkpoints of one run. Methods are collective over the world."""

    def __init__(self, config: Config, store: CheckpointStore, phases: Phases, status: Status):
        self._config, self._store, self._phases, self._status = config, store, phases, status
        self._contents = contents(config, phases.draw.rows)
        self._resumed: tuple[str, dict] | None = None
        """Path and state of the checkpoint that this start continues, until `check_resumed`."""

    def resume(self, newest: Saved | None, named: Saved | None) -> tuple[int, dict[str, float]]:
        """Load the newest checkpoint of the run or, if there is none, the checkpoint of checkpoint.resume.

        Returns the step after which to continue, and the metrics of this step; (0, {}) without a checkpoint.
        """
        config, phases = self._config, self._phases
        models, source = phases.engines.learning, config.model.path
        if named is not None and config.checkpoint.weights_only:
            self._store.load_weights(named, models)
            for model in models.values():
                model.start_from_present_weights()
            phases.step.progress.line(f"loaded the weights of {named.path}")
            source, named = str(named.path), None
        saved = named if newest is None else newest
        if saved is None:
            if source == config.model.path:
                for name, model in models.items():
                    check_loaded(name, model, is_new=name != "policy" or not config.adapter.path)
                # Otherwise the policy is not what the files define.
                if not (config.adapter.path or config.adapter.base == "fp8" or config.model.rope_scaling):
                    check_function(phases.engines.policy, config.agreement.logprob_slack)
            # User code, such as a reward function, may draw from the global generators.
            reseed_rng(seed_of(config.run.seed, "start"))
            phases.checks.start = Start(source, models)
            return 0, {}
        state = self._store.load(saved, models, seed=seed_of(config.run.seed, "resume", saved.step))
        try:
            phases.kl_penalty.controller.load_state_dict(state["kl_controller"])
        except ValueError as error:
            raise ConfigError(
                f"{saved.path} was written with another objective.reward_kl.controller: {error}"
            ) from error
        entropy_control = phases.updates.entropy_control
        if entropy_control is not None and "entropy_control" in state:  # absent after a fixed weight
            entropy_control.load_state_dict(state["entropy_control"])
        try:
            phases.draw.load_state_dict(state)
        except ValueError as error:
            raise ConfigError(f"{saved.path} was written with other data: {error}") from error
        before = state.get("contents", {})
        if found := [name for name, value in self._contents.items() if before.get(name, value) != value]:
            phases.step.progress.line(f"the contents of {', '.join(found)} differ from those at {saved.path}")
        phases.engines.policy.version = state["policy_version"]
        restored, drawn = self._controllers(), phases.draw.state_dict()
        if drawn["num_prompts"] == state.get("num_prompts"):  # else the data has other prompts now
            # The seed or the number of files may have changed, or a curriculum, or the prompts that it reads.
            is_other = drawn["order"].keys() != state.get("order", {}).keys()
            if is_other or (config.data.curriculum and found):
                del drawn["order"]
            restored |= drawn
        check_restored(str(saved.path), state, restored)
        phases.sampler.load_state_dict(state)
        phases.checks.start = Start(str(saved.path), models, state["checksums"])
        self._resumed = str(saved.path), state
        return state["step"], state["metrics"]

    def check_resumed(self) -> None:
        """Raise ChangedSinceStart if anything has changed controllers or version since the resume.

        Call it before the first step collects, when everything else has run.
        """
        if self._resumed is not None:
            check_restored(*self._resumed, self._controllers())
            self._resumed = None

    def state(self, cursor: dict) -> dict:
        """Return the contents of a checkpoint besides the models. Only rank 0's contents are written.

        cursor: `Phases.cursor` after the last batch that was learned from.
        """
        self._phases.draw.check_cursor(cursor)
        state = self._phases.sampler.state_dict(cursor) | self._controllers()
        check_controllers(state, vars(self._phases).values())
        return state | {"contents": self._contents}

    def _controllers(self) -> dict:
        """Return the state that earlier updates have changed, for example the KL coefficient."""
        entropy_control = self._phases.updates.entropy_control
        return {
            "kl_controller": self._phases.kl_penalty.controller.state_dict(),
            "policy_version": self._phases.engines.policy.version,
            **({} if entropy_control is None else {"entropy_control": entropy_control.state_dict()}),
        }

    def save(self, step: int, state: dict, metrics: dict[str, float]) -> None:
        """Write the checkpoint of a step, or start writing it in the background; do nothing if it exists.

        Models, `state` and `metrics` must be from the end of the step.
        """
        with self._phases.saving():
            self._store.save(step, self._phases.engines.learning, state, metrics)
        self._note_complete()

    def poll(self) -> None:
        """Complete the checkpoint that is written in the background, once all of it is on disk."""
        if self._store.is_saving:
            with self._phases.timed("save_checkpoint"):
                self._store.poll()
            self._note_complete()

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._store.close()
        self._note_complete()

    def export(self, step: int) -> None:
        """Write the policy, and its adapters if any, as a Hugging Face checkpoint. step: the last step."""
        config, phases = self._config, self._phases
        policy, target = phases.engines.policy, str(Path(config.run.dir, "hf"))
        fence = phases.step.fence
        with phases.saving():
            check = partial(wrong_export, policy)
            export_hf(policy, config.model.path, target, fence=fence, check=check)
            run_dir = Path(config.run.dir)
            lines = [part.export(policy, config.model.path, run_dir, fence) for part in policy.parts]
        phases.step.progress.line(f"wrote {target}, a Hugging Face checkpoint of step {step}")
        for line in filter(None, lines):
            phases.step.progress.line(line)

    def _note_complete(self) -> None:
        if self._store.complete_step is not None:
            self._status.write(checkpoint_step=self._store.complete_step)
