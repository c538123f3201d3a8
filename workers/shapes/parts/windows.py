"""Chunk sizes for attention, shared by the kernels and the planner. Imports no torch."""

# The most scores at a time, where no kernel computes them blockwise.
MAX_SCORES = 1 << 22

# The most scores of an indexer's heads at a time.
MAX_INDEX_SCORES = 1 << 25

# The most scores, of all heads, and the most elements of the mask of queries that attend to chosen tokens.
_MAX_CHOSEN_SCORES, _MAX_CHOSEN = 1 << 27, 1 << 22

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


def queries_of_index(num_heads: int, num_keys: int) -> int:
    """Returns for how many queries at a time an indexer with so many heads chooses tokens."""
    return max(1, MAX_INDEX_SCORES // (num_heads * num_keys))


def queries_of_choice(num_heads: int, num_keys: int) -> int:
    """Returns how many queries of a sequence attend to chosen tokens at a time, by a kernel with a mask."""
    return max(_FEWEST_QUERIES, min(_MAX_CHOSEN // num_keys, _MAX_CHOSEN_SCORES // (num_heads * num_keys)))


def queries_of_copies(num_numbers: int) -> int:
    """Returns how many queries attend at a time where each has copies of its keys, of so many numbers."""
    return max(_FEWEST_QUERIES, MAX_SCORES // num_numbers)
