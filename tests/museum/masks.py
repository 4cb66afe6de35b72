"""Exhibits of truncated sampling."""

from tests.museum.engine import DIFFER, GAP
from tests.museum.museum import Bug, exhibit


@exhibit(
    name="trainer ignores the truncation",
    peer="huggingface/trl#6789",
    saw="With top_p every importance ratio was multiplied by the probability of the tokens that were kept.",
    caught_by=GAP,
    expects=DIFFER,
    overrides=("rollout.top_p=0.9",),
)
def ignored(bug: Bug) -> None:
    from rl.training import kept_sets

    @bug.replaces(kept_sets, "sets_of")
    def whole(sets_of, batch, samples):
        return None
