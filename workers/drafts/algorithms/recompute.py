"""Recompute: parts of a draft of which a pass keeps the arguments alone, and which run once more on the way back.

Chen et al., Training deep nets with sublinear memory cost (2016), https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

# A part of a draft and its arguments -> what it returns.
Run = Callable[..., Any]


def run_once(part: Callable[..., Any], *arguments: Any) -> Any:
    return part(*arguments)


def run_again(part: Callable[..., Any], *arguments: Any) -> Any:
    """The same numbers to the last bit. Drafts draw nothing, so there is no random state to restore."""
    return checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
