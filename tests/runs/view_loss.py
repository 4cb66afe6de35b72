"""Supervised learning with a loss that is a view of another tensor, as a user's loss may be."""

from rl.algorithms import sft

NEEDS = ("responses",)
DEFAULTS = {"validation.loss": True, "validation.greedy": False}


def collect(phases):
    return sft.collect(phases)


def learn(phases, batch):
    phases.update(batch, loss)


def loss(micro, totals):
    value, metrics = sft.loss(micro, totals)
    return value.view(1)[0], metrics
