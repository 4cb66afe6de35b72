"""Weights of teachers in the dry run."""

from tests.unit.dry_run.test_dry_run import GRPO, found


def test_a_teacher_adds_its_weights_and_its_passes():
    alone = found(GRPO, 8)
    taught = found(GRPO, 8, "teacher.path=qwen2.5-32b", "teacher.advantage_coef=0.1")
    state = taught.memory.stages[0].states["teacher 1"]
    assert state.gradients == state.optimizer == 0
    tp = taught.layout.tp * taught.layout.pp
    assert 64e9 / tp < state.weights < 66e9 / tp + 1e9
    assert taught.memory.peak("training")[0] - alone.memory.peak("training")[0] == state.weights
    assert taught.memory.peak("generation") == alone.memory.peak("generation")
    assert taught.seconds["teacher"] > 3 * alone.seconds["update_actor"] / 6
