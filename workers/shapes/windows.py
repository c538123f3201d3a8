"""Chunk sizes for attention, shared by the kernels and the planner. Imports no torch."""

# The most scores at a time, where no kernel computes them blockwise.
MAX_SCORES = 1 << 22

# The fewest queries at a time.
_FEWEST_QUERIES = 16

# The most elements of a mask.
_MAX_MASKED = 1 << 20


def queries_of_mask(window: int) -> int:
    """Returns how many queries to attend at a time."""
    return max(_FEWEST_QUERIES, min(max(window, 256), _MAX_MASKED // (2 * window)))


def queries_of_scores(num_heads: int, length: int, window: int) -> int:
    """Returns how many queries of each sequence to attend at a time where their scores are kept.

    Args:
        num_heads: of all sequences together.
        length: queries of each sequence.
        window: the most keys that a query sees.
    """
    # n queries have n * (n + window) scores; n bounds them, over all sequences and heads.
    most = MAX_SCORES // num_heads
    return max(_FEWEST_QUERIES, min(window, most // (2 * window), length))
