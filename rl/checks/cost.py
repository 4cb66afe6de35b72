"""The cost of the comparison of the backward pass. The dry run reads this file too, so it imports nothing."""

COST = 0.01
"""Largest cost relative to a step. T response tokens count as a forward pass over at least 4 T tokens."""
TOKENS = range(8, 512)
"""Possible numbers of tokens in a pass, including prompts."""
DIRECTIONS = 5
"""Number of directions along which weights are changed."""


def slope_passes(response_tokens: int, missing: int = DIRECTIONS) -> tuple[int, int]:
    """Return the number of tokens of a pass, and of directions to measure. missing: those not measured yet.

    A gradient counts as three forward passes, and a direction as three: two, or four with random signs.
    """
    budget = int(COST * 4 * response_tokens)
    tokens = min(max(budget // 7, TOKENS.start), TOKENS.stop)
    return tokens, max(min(missing, 2), min(missing, (budget - 3 * tokens) // (3 * tokens)))
