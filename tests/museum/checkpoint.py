"""Exhibits: a run continues from a checkpoint, and does not hold what was saved."""

from tests.museum.museum import Bug, caught_by, exhibit, replaces

LOADED = "checksums of a loaded checkpoint"
START, COMPLETE = "state at the first update", "whole checkpoints"
ADAPTIVE = ("algorithm=ppo", "objective.reward_kl.coef=0.1", "objective.reward_kl.controller=adaptive")


@exhibit("NVIDIA-NeMo/RL#3171", resumes=True)
@caught_by(
    LOADED,
    r"rank 0 .*WronglyLoaded: after loading .*policy/exp_avg.* (none holds them|are not what was saved)",
)
@replaces("rl.checkpoint.store.load_optimizer")
def optimizer_state_reset_on_resume(bug: Bug, load_optimizer, *args):
    """PPO found no optimizer directory and silently began with new Adam moments."""


@exhibit("THUDM/slime#1547", overrides=("training.optimizer.warmup_steps=10",), resumes=True)
@caught_by(
    "schedule of the learning rate",
    r"WrongLearningRate: the schedule gives the policy the learning rate .* in step 3",
)
@replaces("rl.training.learning_rate.learning_rate")
def learning_rate_restarts_on_resume(bug: Bug, learning_rate, optimizer, step, max_steps):
    """The position in the schedule was wrong after every resume."""
    return learning_rate(optimizer, max(0, step - 2), max_steps)


@exhibit("THUDM/slime#1546", overrides=("training.optimizer.warmup_steps=10",), resumes=True)
@caught_by(
    "schedule of the learning rate",
    r"WrongLearningRate: the schedule gives the policy the learning rate .* in step 3",
)
@replaces("rl.training.learning_rate.learning_rate")
def learning_rate_counted_twice_on_resume(bug: Bug, learning_rate, optimizer, step, max_steps):
    """Loading advanced the schedule, and the trainer advanced it once more."""
    return learning_rate(optimizer, step + 2, max_steps)


@exhibit("NovaSky-AI/SkyRL#2149", overrides=("model.dtype=bfloat16",), at=1)
@caught_by(
    "master weights", r"Disagreement: .* of the policy on rank 0 are not the optimizer's master weights"
)
@replaces("rl.checks.checks.Checks.weights")
def master_weights_not_loaded(bug: Bug, check, self, name, model):
    """A load of weights left the master weights as they were; the next update restored them."""
    for weight in model.model.parameters():
        weight.data.mul_(1.25)  # as new weights without reload_model_params
    check(self, name, model)


@exhibit("huggingface/transformers#48569", ranks=2, resumes=True)
@caught_by(LOADED, r"WronglyLoaded: after loading .*policy/exp_avg.* on rank 0, 1")
@replaces("rl.checkpoint.shards.ShardReader.fill")
def optimizer_shard_of_another_rank(bug: Bug, fill, self, name, box, out):
    """With tensor parallelism the optimizer came back with the wrong state, without a warning."""
    if "/exp_avg/" in name:
        box = tuple((0, stop - start) for start, stop in box)
    fill(self, name, box, out)


@exhibit(
    "facebookresearch/metaseq#53",
    resumes=True,
    overrides=("checkpoint.keep_last=0", "checkpoint.resume=auto"),
)
@caught_by("checksums of the files", r"step_000002/.* is damaged: its checksum is")
@replaces("rl.run.loop.find_checkpoint")
def file_of_another_step(bug: Bug, find_checkpoint, config, store):
    """A failed save left files of several saves under one name."""
    import shutil

    steps = sorted(store.directory.glob("step_*"))
    (name,) = [path.name for path in steps[-1].glob("*.safetensors")]
    shutil.copy(steps[0] / name, steps[-1] / name)
    shutil.rmtree(steps[0])
    return find_checkpoint(config, store)


@exhibit("huggingface/trl#2095", overrides=("algorithm=ppo",), resumes=True)
@caught_by(LOADED, r"WronglyLoaded: after loading .*critic/weight/score.weight")
@replaces("rl.checkpoint.shards.ShardReader.fill")
def value_head_not_loaded(bug: Bug, fill, self, name, box, out):
    """A warning said that no v_head weight was found; training went on with a new one."""
    if "critic/weight/score" not in name:
        fill(self, name, box, out)


@exhibit("NVIDIA-NeMo/RL#3722", overrides=("objective.kl_coef=0.01",), resumes=True)
@caught_by(LOADED, r"WronglyLoaded: after loading .*policy/reference/")
@replaces("rl.checkpoint.store.load_weights")
def reference_of_a_resumed_run_is_its_policy(bug: Bug, load_weights, name, engine, reader):
    """After a resume the KL divergence was measured from the checkpoint, not from the base model."""
    load_weights(name, engine, reader)
    engine.reference.take()


@exhibit("NVIDIA-NeMo/RL#2955", overrides=("objective.kl_coef=0.01",), resumes=True)
@caught_by(START, r"ChangedSinceStart: before the first update of the policy, policy/reference/")
@replaces("rl.run.checkpoints.RunCheckpoints.resume")
def reference_taken_after_the_load(bug: Bug, resume, self, *found):
    """After a resume the reference was the policy of the checkpoint."""
    result = resume(self, *found)
    self._phases.engines.policy.reference.take()
    return result


@exhibit("NVIDIA-NeMo/RL#3544", resumes=True, overrides=("model.dtype=bfloat16",))
@caught_by(START, r"ChangedSinceStart: before the first update of the policy, policy/exp_avg/.* on rank 0")
@replaces("rl.engines.memory.refit")
def moments_lost_before_the_first_update(bug: Bug, refit, trainer, engine, **options):
    """Adam's moments were right after the load, and lost when the optimizer's memory was given away."""
    for state in trainer.optimizer.chained_optimizers[0].optimizer.state.values():
        state["exp_avg"].zero_()
    return refit(trainer, engine, **options)


@exhibit("PrimeIntellect-ai/prime-rl#2953", model="deepseek-v3")
@caught_by("state of the optimizer", r"StateChanged: .*e_score_correction_bias.* but must not learn")
@replaces("rl.training.gradients.finalize_model_grads")
def router_bias_that_learns(bug: Bug, finalize, models, *args, **options):
    """The bias that balances the experts was updated after each step, while replay fixed their choice."""
    finalize(models, *args, **options)
    for name, buffer in models[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer += 0.01


@exhibit("radixark/Megatron-LM#69", resumes=True)
@caught_by(LOADED, r"WronglyLoaded: .* the optimizer of the policy counts 1 steps instead of")
@replaces("rl.checkpoint.store.load_optimizer")
def adam_begins_again_at_step_1(bug: Bug, load_optimizer, name, engine, reader, step):
    """Adam's moments came back, but not the number of steps, so the bias correction restarted."""
    load_optimizer(name, engine, reader, 1)


@exhibit("allenai/open-instruct#1523", resumes=True)
@caught_by(START, r"ChangedSinceStart: .* after it was restored: the run would not continue")
@replaces("rl.phases.draw.Draw.load_state_dict")
def data_from_the_beginning_after_a_resume(bug: Bug, load_state_dict, self, state):
    """A resumed run began with the first prompts again."""


@exhibit("NVIDIA-NeMo/Automodel#2511", overrides=("checkpoint.export_hf=true",), at=3)
@caught_by(
    "exported tensors", r"WronglyExported: .*lm_head.weight in the files differ from the model's, 1 in all"
)
@replaces("rl.checkpoint.hf.save_tensors")
def exported_head_is_the_embedding(bug: Bug, save_tensors, tensors, path):
    """The head of a model with an untied head was written as the embedding."""
    head = tensors["model.embed_tokens.weight"].clone()
    save_tensors(tensors | {"lm_head.weight": head}, path)


@exhibit("OpenEuroLLM/oellm-autoexp#54", overrides=("checkpoint.export_hf=true",), at=3)
@caught_by(
    "exported tensors", r"WronglyExported: .*transformers computes log-probs from the files that differ"
)
def exported_config_with_another_rotary_base(bug: Bug) -> None:
    """The exported weights were right, but the config beside them gave the rotary embedding another base."""
    import json

    from rl.checkpoint import hf

    @bug.replaces(hf, "_copy_config")
    def other(copy_config, model, source, target):
        copy_config(model, source, target)
        config = json.loads((target / "config.json").read_text())
        for rope in (config, config.get("rope_parameters") or {}):
            if "rope_theta" in rope:
                rope["rope_theta"] = 10.0
        (target / "config.json").write_text(json.dumps(config))


@exhibit(
    "redai-studio/Relax#262",
    overrides=(
        "checkpoint.export_hf=true",
        "adapter.kind=lora",
        "adapter.init=pissa",
        "model.dtype=bfloat16",
    ),
    at=3,
)
@caught_by(
    "exported tensors", r"WronglyExported: .*lora_B.weight in the files differ from the model's, 1 in all"
)
def exported_adapter_lacks_a_part(bug: Bug) -> None:
    """A layer's adapter was exported empty, because its name differed in the file."""
    from rl.features.adapters import peft

    @bug.replaces(peft, "save_tensors")
    def some(save_tensors, tensors, path):
        name = next(name for name in tensors if ".lora_B." in name)
        return save_tensors(tensors | {name: tensors[name] * 0}, path)


@exhibit("google/tunix#2288", resumes=True)
@caught_by(START, r"ChangedSinceStart: order of .* after it was restored: the run would not continue")
@replaces("rl.data.prompt_order.EpochOrder.load_state_dict")
def shuffle_begins_again_after_a_resume(bug: Bug, load_state_dict, self, state):
    """The position came back, but in another permutation: prompts were repeated, and others never seen."""
    load_state_dict(self, state)
    self._order = self._order[::-1].copy()


@exhibit("huggingface/accelerate#4195", overrides=("data.curriculum=TOY/order.py:order",), resumes=True)
@caught_by(START, r"ChangedSinceStart: order of .*data.curriculum.* after it was restored: the run would not")
@replaces("rl.data.curriculum.check_order")
def user_order_begins_again_after_a_resume(bug: Bug, check_order, *args, **options):
    """The position was restored, but the order of a sampler came from a generator with another state."""
    return check_order(*args, **options)[::-1].copy()


@exhibit("lqtrung1998/mwp_ReFT#26", overrides=("algorithm=ppo",), at=0)
@caught_by(START, r"ChangedSinceStart: critic learns, but checkpoints have only policy: a resumed run would")
def critic_that_no_checkpoint_has(bug: Bug) -> None:
    """Checkpoints had no critic, so that a resumed run trained a new critic."""
    from rl.engines.engines import Engines

    bug.acts()
    Engines.learning = property(lambda self: {"policy": self.policy})


@exhibit(
    "sgl-project/sglang#40835",
    overrides=("checkpoint.export_hf=true", "adapter.kind=rslora", "adapter.rank=4", "adapter.alpha=4"),
    at=3,
)
@caught_by("exported tensors", r"WronglyExported: .*adapter_config.json has 1 \(lora_alpha=4, r=4")
def exported_adapter_with_another_scale(bug: Bug) -> None:
    """The scale of an adapter with rslora was read as alpha / rank, so that its change was too small."""
    from rl.features.adapters import peft

    @bug.replaces(peft, "peft_config")
    def other(peft_config, *args, rank, scale, source):
        return peft_config(*args, rank=rank, scale=scale / rank**0.5, source=source)


@exhibit("TensorAuto/OpenTau#185", overrides=("model.dtype=bfloat16", "checkpoint.every=1"))
@caught_by(COMPLETE, r"WronglySaved: a checkpoint would have 0 of \d+ numbers of policy/master/")
@replaces("rl.checkpoint.contents._optimizer_tensors")
def checkpoints_without_master_weights(bug: Bug, tensors, optimizers, parameter):
    """A resume made the master weights of the rounded weights, and lost what was below the rounding."""
    start, found = tensors(optimizers, parameter)
    return start, {part: tensor for part, tensor in found.items() if part != "master"}


@exhibit(
    "verl-project/verl#2653",
    overrides=(
        "objective.adaptive_entropy.target=6.0",
        "objective.adaptive_entropy.delta=0.01",
        "checkpoint.every=1",
    ),
)
@caught_by(COMPLETE, r"WronglySaved: a checkpoint would lack \{'coef': .*\} of EntropyController")
@replaces("rl.run.checkpoints.RunCheckpoints._controllers")
def controller_that_no_checkpoint_has(bug: Bug, controllers, self):
    """An adaptive coefficient began again at its first value after each resume."""
    return {name: state for name, state in controllers(self).items() if name != "entropy_control"}


@exhibit(
    "NVIDIA/TensorRT-Model-Connect#1115", ranks=2, overrides=("model.path=TOY/fp8", "training.tp=2"), at=0
)
@caught_by("weights of the files", r"ChangedSinceStart: .* of the policy are not those in the files of")
@replaces("rl.training.weights.dequantised")
def factors_of_other_blocks(bug: Bug, dequantised, values, factors, box):
    """Blocks were taken to begin where the part began, so elements got the factor of another block."""
    return dequantised(values, factors, [(0, stop - start) for start, stop in box])


@exhibit("ray-project/ray#22444", overrides=(*ADAPTIVE, "checkpoint.every=1"), at=1)
@caught_by(COMPLETE, r"WronglySaved: a checkpoint would lack \{'coef': .*\} of AdaptiveKL")
@replaces("rl.objectives.kl_controller.AdaptiveKL.state_dict")
def first_coefficient_saved(bug: Bug, state_dict, self):
    """After a restore the coefficient was the configuration's again."""
    return {"coef": 0.1}


@exhibit("vllm-project/vime#324", overrides=("rollout.carry_over=true",), resumes=True)
@caught_by(START, r"ChangedSinceStart: prompts of the checkpoint's carry_over is .* after it was restored")
@replaces("rl.features.carry_over.carry_over.replace")
def carried_groups_without_their_draws(bug: Bug, replace, value, **changes):
    """After a resume the next sample had another index than in a run without a stop."""
    return replace(value, **{name: own for name, own in changes.items() if name != "draw"})
