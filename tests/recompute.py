"""Keys of the section training for activations that the backward pass computes again, in one word."""


def recompute_of(word: str) -> dict[str, object]:
    """Return the keys for "" (none), "full", "full:2" (every second layer) or "mlp,moe" (selective)."""
    kind, _, every = word.partition(":")
    if kind in ("", "full"):
        return {"recompute": kind or "none", "recompute_every": int(every or 1)}
    return {"recompute": "selective", "recompute_modules": kind.split(",")}
