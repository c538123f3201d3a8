"""The unembedding: log-probabilities a chunk of rows at a time, and the gradient of the losses in the same pass.

A chunk's rows may be of any adapters and losses. No [tokens, vocabulary] tensor exists beyond one chunk.
Log-probabilities are float32 for a bf16 base too.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .lora import LoraPair, Segment
from .losses import LossOutput
from .model import BaseModel
from .objective import Objective, join_outputs
from .parallel.mesh import Mesh
from .parallel.rows import TokenShare, overlap


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """Of the n rows of an objective. logprobs: float32 of its targets' shape, [n] or [n, K]."""

    logprobs: Tensor
    scored: LossOutput


class Head:
    """Stateless but for the frozen weights. Segments say whose part of the output head each row gets.

    Segments and objectives are in the order of the rows, and objectives cover all of them. Where ranks share them out,
    hidden, gradient and segments are of this rank's, `share.rows`; objectives and outputs of all.
    """

    def __init__(self, base: BaseModel, chunk_rows: int) -> None:
        self._unembedding = base.unembedding
        self._product = base.product
        self._chunk_rows = chunk_rows

    def one_of(self, number: int) -> "Head":
        """One of so many that run at once, which have together as many logits as one alone."""
        part = copy(self)
        part._chunk_rows = max(1, self._chunk_rows // number)
        return part

    @torch.no_grad()
    def logits(self, hidden: Tensor, pair: LoraPair | None) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab]; the caller bounds n."""
        logits = self._product(hidden, self._unembedding)
        if pair is not None:
            pair.add_up(logits, pair.down(hidden))
        return logits.float()

    @torch.no_grad()
    def logits_of_segments(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """As `logits`, for rows of several adapters: hidden [n, hidden] -> float32 [n, vocab]."""
        logits = self._product(hidden, self._unembedding)
        _add_pairs(logits, hidden, segments)
        return logits.float()

    @torch.no_grad()
    def losses(
        self,
        hidden: Tensor,
        segments: Sequence[Segment],
        objectives: Sequence[Objective],
        share: TokenShare | None = None,
    ) -> list[HeadOutput]:
        """Of hidden [n, hidden], by objective, without gradients. share: None = this rank has all rows."""
        share = share or TokenShare(len(hidden), Mesh())
        targets = share.of_rows(_side_by_side([each.targets for each in objectives]))
        logprobs = share.joined(self._logprobs(hidden, segments, targets, self._room(hidden)))
        return [_evaluated(objective, logprobs) for objective in objectives]

    @torch.no_grad()
    def losses_and_gradient(
        self,
        hidden: Tensor,
        segments: Sequence[Segment],
        objectives: Sequence[Objective],
        gradient: Tensor,
        share: TokenShare | None = None,
    ) -> list[HeadOutput]:
        """Writes the gradient by hidden [n, hidden] to `gradient`, and adds the pairs' to their adapters' scratch."""
        share = share or TokenShare(len(hidden), Mesh())
        targets = share.of_rows(_side_by_side([each.targets for each in objectives]))
        room = self._room(hidden)
        scorings = [_Scoring(objective) for objective in objectives]
        if any(self._wants_all_first(objective, share) for objective in objectives):
            logprobs = share.joined(self._logprobs(hidden, segments, targets, room))
            for scoring in scorings:
                if self._wants_all_first(scoring.objective, share):
                    scoring.score_all(logprobs)
        parts = []
        for rows in self._chunks(len(hidden)):
            inside = within(segments, rows)
            log_softmax = self._log_softmax(hidden[rows], inside, room)
            parts.append(_gather(log_softmax, targets[rows]))
            d_logprobs = _score(scorings, share.places(rows), parts[-1])
            self._backward(log_softmax, targets[rows], d_logprobs, hidden[rows], inside, gradient[rows], room)
        if share.is_all:
            return [scoring.output() for scoring in scorings]
        logprobs = share.joined(_concatenated(parts, targets))
        return [_evaluated(objective, logprobs) for objective in objectives]

    def _wants_all_first(self, objective: Objective, share: TokenShare) -> bool:
        """A sequence-wise loss over several chunks takes a pass of its own: the loss of a whole sequence must be known
        before any gradient."""
        first, last = objective.start // self._chunk_rows, (objective.stop - 1) // self._chunk_rows
        return objective.loss.sequence_wise and (first != last or not share.is_all)

    def _logprobs(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor, room: "_Room") -> Tensor:
        parts = [
            _gather(self._log_softmax(hidden[rows], within(segments, rows), room), targets[rows])
            for rows in self._chunks(len(hidden))
        ]
        return _concatenated(parts, targets)

    def _log_softmax(self, hidden: Tensor, segments: Sequence[Segment], room: "_Room") -> Tensor:
        """Valid until the next chunk's."""
        logits = room.whole[: len(hidden)]
        if self._product.is_torch and hidden.dtype == logits.dtype:
            torch.mm(hidden, self._unembedding.t(), out=logits)
            _add_pairs(logits, hidden, segments)
        else:
            logits.copy_(self.logits_of_segments(hidden, segments))
        return torch.log_softmax(logits, dim=-1, out=logits)

    def _room(self, hidden: Tensor) -> "_Room":
        num_rows = min(self._chunk_rows, len(hidden))
        return _Room(torch.empty(num_rows, len(self._unembedding), device=hidden.device))

    def _chunks(self, num_rows: int) -> Iterator[slice]:
        return (slice(i, min(i + self._chunk_rows, num_rows)) for i in range(0, num_rows, self._chunk_rows))

    def _backward(
        self,
        log_softmax: Tensor,
        targets: Tensor,
        d_logprobs: Tensor,
        hidden: Tensor,
        segments: Sequence[Segment],
        gradient: Tensor,
        room: "_Room",
    ) -> None:
        """The gradient of one chunk, which it takes over log_softmax's memory for.

        Rows without a gradient are left out: it is exactly 0 there, whatever the logits are, and costs nothing.
        """
        has_gradient = d_logprobs != 0 if d_logprobs.ndim == 1 else (d_logprobs != 0).any(dim=1)
        if bool(has_gradient.all()):
            gradient.copy_(self._hidden_gradient(log_softmax, targets, d_logprobs, hidden, segments))
            return
        gradient.zero_()
        rows = has_gradient.nonzero().squeeze(1)
        if len(rows):
            gradient[rows] = self._hidden_gradient(
                room.some_of(log_softmax, rows), targets[rows], d_logprobs[rows], hidden[rows], _among(segments, rows)
            )

    def _hidden_gradient(
        self, log_softmax: Tensor, targets: Tensor, d_logprobs: Tensor, hidden: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        """d l_y / d logits = onehot(y) - softmax."""
        d_targets = d_logprobs if d_logprobs.ndim == 2 else d_logprobs[:, None]
        d_logits = log_softmax.exp_().mul_(-d_targets.sum(dim=1, keepdim=True))
        d_logits.scatter_add_(1, targets if targets.ndim == 2 else targets[:, None], d_targets)
        d_logits = d_logits.to(hidden.dtype)
        d_hidden = self._product(d_logits, self._unembedding.t())
        for segment, pair in _with_pair(segments):
            rows = slice(segment.start, segment.stop)
            pair.backward(d_logits[rows], hidden[rows], pair.down(hidden[rows]), d_hidden[rows])
        return d_hidden


class _Room:
    """Where the float32 logits of one chunk after the other lie. whole: [rows, vocab].

    Had each chunk a tensor of its own, glibc before 2.38 would seldom find the room of the last one again: torch wants
    it aligned. Memory would then grow as if all logits were kept.
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._part: Tensor | None = None

    def some_of(self, log_softmax: Tensor, rows: Tensor) -> Tensor:
        """A copy of these rows; valid until the next call."""
        if self._part is None:
            self._part = torch.empty_like(self.whole)
        return torch.index_select(log_softmax, 0, rows, out=self._part[: len(rows)])


class _Scoring:
    """An objective on its way through the chunks."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._logprobs: list[Tensor] = []
        self._scored: list[LossOutput] = []
        self._whole_gradient: Tensor | None = None

    def score_all(self, logprobs: Tensor) -> None:
        """Before the first chunk: those of all rows."""
        self._whole_gradient = self._gradient(_of(self.objective, logprobs), slice(None))

    def gradient(self, logprobs: Tensor, rows: slice) -> Tensor:
        """By the log-probabilities of `rows`, counted from the objective's first."""
        if self._whole_gradient is not None:
            return self._whole_gradient[rows]
        return self._gradient(logprobs, rows)

    def output(self) -> HeadOutput:
        return HeadOutput(torch.cat(self._logprobs), join_outputs(self._scored))

    def _gradient(self, logprobs: Tensor, rows: slice) -> Tensor:
        output, gradient = self.objective.gradient(logprobs, rows)
        self._logprobs.append(logprobs)
        self._scored.append(output)
        return gradient


def _of(objective: Objective, logprobs: Tensor) -> Tensor:
    return _in_shape_of(objective.targets, logprobs[objective.start : objective.stop])


def _evaluated(objective: Objective, logprobs: Tensor) -> HeadOutput:
    """logprobs: of all rows."""
    own = _of(objective, logprobs)
    return HeadOutput(own, objective.evaluate(own, slice(None)))


def _concatenated(logprobs: list[Tensor], targets: Tensor) -> Tensor:
    if len(logprobs) == 1:
        return logprobs[0]
    return torch.cat(logprobs) if logprobs else torch.empty(targets.shape, device=targets.device)


def _score(scorings: list[_Scoring], rows: slice, logprobs: Tensor) -> Tensor:
    """The gradient of all losses by the log-probabilities of a chunk, `rows`."""
    gradient = torch.zeros_like(logprobs)
    for scoring in scorings:
        objective = scoring.objective
        piece = overlap(rows, objective.start, objective.stop)
        if piece.start < piece.stop:
            own = _in_shape_of(objective.targets, logprobs[piece])
            first, stop = (rows.start + rows.step * bound - objective.start for bound in (piece.start, piece.stop))
            found = scoring.gradient(own, slice(first, stop, rows.step))
            _in_shape_of(objective.targets, gradient[piece]).copy_(found)
    return gradient


def _side_by_side(targets: list[Tensor]) -> Tensor:
    """[n] and [n, K] tensors one after another: all [n], or all [n, largest K] with zeros where a row has fewer."""
    if len(targets) == 1:
        return targets[0]
    if all(each.ndim == 1 for each in targets):
        return torch.cat(targets)
    columns = [each.reshape(len(each), -1) for each in targets]
    widest = max(each.shape[1] for each in columns)
    return torch.cat([pad(each, (0, widest - each.shape[1])) for each in columns])


def _in_shape_of(targets: Tensor, values: Tensor) -> Tensor:
    """The view of rows of a `_side_by_side` tensor that belongs to these targets."""
    if values.ndim == 1:
        return values
    return values[:, 0] if targets.ndim == 1 else values[:, : targets.shape[1]]


def within(segments: Sequence[Segment], rows: slice) -> list[Segment]:
    """The segments of `rows`, counted from their first."""
    parts = [(overlap(rows, segment.start, segment.stop), segment.adapter) for segment in segments]
    return [Segment(part.start, part.stop, adapter) for part, adapter in parts if part.start < part.stop]


def _among(segments: Sequence[Segment], rows: Tensor) -> list[Segment]:
    """The segments of a selection of rows, int64 in ascending order, counted from its first."""
    if not any(True for _ in _with_pair(segments)):
        return []
    borders = torch.tensor([[segment.start, segment.stop] for segment in segments], device=rows.device)
    return [
        Segment(start, stop, segment.adapter)
        for segment, (start, stop) in zip(segments, torch.searchsorted(rows, borders).tolist(), strict=True)
        if start < stop
    ]


def _add_pairs(logits: Tensor, hidden: Tensor, segments: Sequence[Segment]) -> None:
    for segment, pair in _with_pair(segments):
        rows = slice(segment.start, segment.stop)
        pair.add_up(logits[rows], pair.down(hidden[rows]))


def _with_pair(segments: Sequence[Segment]) -> Iterator[tuple[Segment, LoraPair]]:
    """Those whose adapter has a part of the output head."""
    for segment in segments:
        pair = segment.adapter.unembed if segment.adapter is not None else None
        if pair is not None:
            yield segment, pair


def _gather(log_softmax: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return log_softmax.gather(1, targets)
    return log_softmax.gather(1, targets[:, None]).squeeze(1)
