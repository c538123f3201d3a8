"""Chunk sizes for sliding-window attention, shared by the kernels and the planner. Imports no torch."""

# The most scores at a time, where no kernel computes them blockwise.
MAX_SCORES = 1 << 22

# Limits of a mask: the most elements, and the fewest queries.
_MAX_MASKED, _FEWEST_QUERIES = 1 << 20, 16


def queries_of_mask(window: int) -> int:
    """Returns how many queries to attend at a time."""
    return max(_FEWEST_QUERIES, min(max(window, 256), _MAX_MASKED // (2 * window)))
