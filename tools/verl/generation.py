"""verl's generation without training, as run.mode=rollout_only."""

from typing import Any

from tools.verl.script import VerlSettings

NAMES = {
    "data.path": "data.train_files",
    "data.n_samples": "actor_rollout_ref.rollout.n",
    "data.batch_size": "data.train_batch_size",
    "model.path": "actor_rollout_ref.model.path",
}
"""Setting of main_generation, verl's older program -> setting of main_generation_server."""


def read_generation(settings: VerlSettings, notes: list[str]) -> bool:
    """Return whether the script only generates; give its settings the names of training's settings."""
    given = settings.given
    if not given.get("data.output_path"):
        return False
    if "data.path" not in given and given.pop("actor_rollout_ref.rollout.top_k", None):
        notes.append("rollout.top_k is not set, because main_generation_server does not read it.")
    for key in list(given):
        name = f"actor_rollout_ref.{key}" if key.startswith(("rollout.", "model.")) else key
        given[NAMES.get(key, name)] = given.pop(key)
    for name, ours in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        given.setdefault(f"data.{ours}", settings.get(f"actor_rollout_ref.rollout.{name}", 512))
    for key, value in {
        **{"algorithm.adv_estimator": "grpo", "data.shuffle": False, "trainer.total_epochs": 1},
        **{"data.train_batch_size": 128, "trainer.val_before_train": False, "data.val_files": []},
    }.items():
        given.setdefault(key, value)
    given["actor_rollout_ref.actor.ppo_mini_batch_size"] = given["data.train_batch_size"]
    return True


def generation(settings: VerlSettings, notes: list[str], rows: int) -> dict[str, Any]:
    """Translate what is generated and where it is stored. rows: number of the prompts; 0 if unknown."""
    notes.append(
        f"data.output_path={settings.get('data.output_path')}: responses and their scores are in "
        "<run.dir>/rollouts, which `lockstep samples` reads; the last step may repeat the first prompts."
    )
    per_step = settings.get("data.train_batch_size")
    ours: dict[str, Any] = {"run.mode": "rollout_only", "logging.rollouts": "all"}
    return ours | ({"run.max_steps": -(-rows // per_step)} if rows else {})
