"""The value head of critics: one number for each final hidden state, from weights that the run trains."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..lora import Segment
from ..models.model import BaseModel
from ..programs.critic import BIAS, WEIGHT
from ..state.trainable import Trainable


class ValueHead:
    """Computes values in float32, even if the base model is bfloat16. The weights belong to each run's
    model, an adapter or a full one."""

    def __init__(self, base: BaseModel, chunk_tokens: int) -> None:
        """Ignores chunk_tokens, which limits heads that need as much memory as logits do."""

    def split_budget(self, number: int) -> "ValueHead":
        return self

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_pass(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> "_ValuePass":
        """Starts a pass. Each token has one score, which does not depend on its target; further columns are 0."""
        return _ValuePass(hidden, segments, targets)


class _ValuePass:
    """Implements HeadPass, with all tokens in one chunk."""

    def __init__(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> None:
        self._hidden, self._segments, self._targets = hidden, segments, targets

    @property
    def chunk_tokens(self) -> int:
        return max(1, len(self._hidden))

    def scores(self, tokens: slice) -> Tensor:
        scores = torch.zeros(self._targets.shape, device=self._hidden.device)
        values = _first_column(scores)
        for tokens, model in self._parts():
            weight, bias = model.tensor(WEIGHT), model.tensor(BIAS)
            values[tokens] = torch.addmv(bias, self._hidden[tokens].float(), weight[0])
        return scores

    def backward(self, gradient: Tensor, hidden_gradient: Tensor) -> None:
        by_value = _first_column(gradient)
        hidden_gradient.zero_()
        for tokens, model in self._parts():
            own = by_value[tokens]
            model.gradient(WEIGHT)[0].addmv_(self._hidden[tokens].float().t(), own)
            model.gradient(BIAS).add_(own.sum())
            hidden_gradient[tokens] = torch.outer(own, model.tensor(WEIGHT)[0]).to(hidden_gradient.dtype)

    def _parts(self) -> Iterator[tuple[slice, Trainable]]:
        for segment in self._segments:
            if segment.model is not None:
                yield slice(segment.start, segment.stop), segment.model


def _first_column(scores: Tensor) -> Tensor:
    return scores if scores.ndim == 1 else scores[:, 0]
