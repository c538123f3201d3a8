"""Windows: how much of attention in a sliding window exists at a time, which the plan of a layout says, too. Imports no
torch."""

# Scores, where no kernel makes them piece by piece.
MOST_SCORES = 1 << 22

# Of a mask, which shows some queries what they see: its numbers, at most, and its queries, at least.
_MOST_MASKED, _FEWEST_QUERIES = 1 << 20, 16


def queries_of_mask(window: int) -> int:
    """How many of them are attended at a time."""
    return max(_FEWEST_QUERIES, min(max(window, 256), _MOST_MASKED // (2 * window)))
