"""Exhibits: a run continues from a checkpoint, and does not hold what was saved."""

from tests.museum.museum import Bug, exhibit

LOADED = "checksums of a loaded checkpoint"


@exhibit(
    name="optimizer state reset on resume",
    peer="NVIDIA-NeMo/RL#3171",
    saw="PPO found no optimizer directory and silently began with new Adam moments.",
    caught_by=LOADED,
    expects=r"rank 0 .*WronglyLoaded: after loading .*policy/exp_avg.* because none holds them",
    resumes=True,
    at=0,
)
def optimizer_reset(bug: Bug) -> None:
    from rl.checkpoint import store

    @bug.replaces(store, "load_optimizer")
    def nothing(load_optimizer, *args):
        pass


@exhibit(
    name="learning rate restarts on resume",
    peer="THUDM/slime#1547",
    saw="The position in the schedule was wrong after every resume.",
    caught_by="schedule of the learning rate",
    expects=r"WrongLearningRate: the learning rate of the policy was .* in step 2",
    overrides=("training.optimizer.warmup_steps=10",),
    resumes=True,
    at=0,
)
def rate_restarts(bug: Bug) -> None:
    from rl.training import schedule

    @bug.replaces(schedule, "learning_rate")
    def since_the_start(learning_rate, optimizer, step, max_steps):
        return learning_rate(optimizer, max(0, step - 2), max_steps)


@exhibit(
    name="learning rate counted twice on resume",
    peer="THUDM/slime#1546",
    saw="Loading advanced the schedule, and the trainer advanced it once more.",
    caught_by="schedule of the learning rate",
    expects=r"WrongLearningRate: the learning rate of the policy was .* in step 2",
    overrides=("training.optimizer.warmup_steps=10",),
    resumes=True,
    at=0,
)
def rate_doubled(bug: Bug) -> None:
    from rl.training import schedule

    @bug.replaces(schedule, "learning_rate")
    def twice(learning_rate, optimizer, step, max_steps):
        return learning_rate(optimizer, step + 2, max_steps)


@exhibit(
    name="master weights not loaded",
    peer="NovaSky-AI/SkyRL#2149",
    saw="A load of weights left the master weights as they were; the next update restored them.",
    caught_by="master weights",
    expects=r"Disagreement: .* of the policy on rank 0 are not the optimizer's master weights",
    overrides=("model.dtype=bfloat16",),
    at=1,
)
def masters_stale(bug: Bug) -> None:
    from rl.checks.checks import Checks

    @bug.replaces(Checks, "_weights")
    def after_loading(check, self, name, model):
        for weight in model.model.parameters():
            weight.data.mul_(1.25)  # as new weights without reload_model_params
        check(self, name, model)


@exhibit(
    name="optimizer shard of another rank",
    peer="huggingface/transformers#48569",
    saw="With tensor parallelism the optimizer came back with the wrong state, without a warning.",
    caught_by=LOADED,
    expects=r"WronglyLoaded: after loading .*policy/exp_avg.* on rank 0, 1",
    ranks=2,
    resumes=True,
    at=0,
)
def other_shard(bug: Bug) -> None:
    from rl.checkpoint.shards import ShardReader

    @bug.replaces(ShardReader, "fill")
    def first_rows(fill, self, name, box, out):
        if "/exp_avg/" in name:
            box = tuple((0, stop - start) for start, stop in box)
        fill(self, name, box, out)


@exhibit(
    name="file of another step",
    peer="facebookresearch/metaseq#53",
    saw="A failed save left files of several saves under one name.",
    caught_by="checksums of the files",
    expects=r"step_000002/.* is damaged: its checksum is",
    resumes=True,
    overrides=("checkpoint.keep_last=0", "checkpoint.resume=auto"),
    at=0,
)
def other_step(bug: Bug) -> None:
    from rl.run import loop

    @bug.replaces(loop, "find_checkpoint")
    def after_exchange(find_checkpoint, config, store):
        import shutil

        steps = sorted(store.directory.glob("step_*"))
        (name,) = [path.name for path in steps[-1].glob("*.safetensors")]
        shutil.copy(steps[0] / name, steps[-1] / name)
        shutil.rmtree(steps[0])
        return find_checkpoint(config, store)


@exhibit(
    name="value head not loaded",
    peer="huggingface/trl#2095",
    saw="A warning said that no v_head weight was found; training went on with a new one.",
    caught_by=LOADED,
    expects=r"WronglyLoaded: after loading .*critic/weight/score.weight",
    overrides=("algorithm=ppo",),
    resumes=True,
    at=0,
)
def no_value_head(bug: Bug) -> None:
    from rl.checkpoint.shards import ShardReader

    @bug.replaces(ShardReader, "fill")
    def all_but_head(fill, self, name, box, out):
        if "critic/weight/score" not in name:
            fill(self, name, box, out)


@exhibit(
    name="reference of a resumed run is its policy",
    peer="NVIDIA-NeMo/RL#3722",
    saw="After a resume the KL divergence was measured from the checkpoint, not from the base model.",
    caught_by=LOADED,
    expects=r"WronglyLoaded: after loading .*policy/reference/",
    overrides=("objective.kl_coef=0.01",),
    resumes=True,
    at=0,
)
def reference_of_checkpoint(bug: Bug) -> None:
    from rl.checkpoint import store

    @bug.replaces(store, "load_weights")
    def then_copied(load_weights, name, engine, reader):
        load_weights(name, engine, reader)
        engine.reference.take()
