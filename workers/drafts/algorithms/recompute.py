"""Activation recomputation: only the arguments of a part of a draft are kept, and it runs again in the backward pass.

Chen et al., Training deep nets with sublinear memory cost (2016), https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

# Calls a part of a draft with its arguments.
RunPart = Callable[..., Any]


def run_keeping(part: Callable[..., Any], *arguments: Any) -> Any:
    return part(*arguments)


def run_recomputing(part: Callable[..., Any], *arguments: Any) -> Any:
    """Runs the part, and recomputes it in the backward pass with the same numbers to the last bit.

    Drafts draw no random numbers, so there is no random state to restore.
    """
    return checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
