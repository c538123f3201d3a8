"""Scores of draft tokens against the target's distribution, in chunks of rows: logits exist for one chunk at a time."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...losses.draft_scores import DraftGradients, DraftScores
from ...ops.linear import add_product
from ..sequences.features import Logits


@dataclass(frozen=True, eq=False)
class TargetDistribution:
    """The target's distribution at m positions.

    of_draft: [m, V], its distribution restricted to the draft's vocabulary.
    share: [m, 1], the probability that it gives to the draft's vocabulary.
    likeliest: int64 [m], among all tokens.
    covered: bool [m], True where the draft's vocabulary contains the likeliest token.
    """

    of_draft: Tensor
    share: Tensor
    likeliest: Tensor
    covered: Tensor


class TargetDistributions:
    """Computes the target's distribution at given positions.

    vocabulary: int64 [V], the draft's, ascending.
    """

    def __init__(self, logits: Logits, vocabulary: Tensor, target_vocabulary: int) -> None:
        self._logits, self._vocabulary = logits, vocabulary
        self._says_all = len(vocabulary) == target_vocabulary

    def of(self, rows: Tensor) -> TargetDistribution:
        """Returns the distribution at the positions `rows`, int64 [m]."""
        logits = self._logits(rows)
        likeliest = logits.argmax(-1)
        if self._says_all:
            all_of_it = torch.ones_like(likeliest, dtype=torch.bool)
            return TargetDistribution(logits.softmax(-1), logits.new_ones(len(logits), 1), likeliest, all_of_it)
        own = logits[:, self._vocabulary]
        share = (own.logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)).exp()
        return TargetDistribution(own.softmax(-1), share, likeliest, torch.isin(likeliest, self._vocabulary))


class DraftTokenChunk:
    """The draft's predictions for m rows, `depth` in each."""

    def __init__(self, hidden: Tensor, head: Tensor, vocabulary: Tensor, taught: TargetDistribution) -> None:
        """Computes the draft's log-probabilities.

        Args:
            hidden: [m, depth, size].
            head: [V, size]; its gradient is added to `head.grad`.
        """
        self._hidden, self._head, self._vocabulary, self._taught = hidden, head, vocabulary, taught
        self._exists = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        logits = hidden.flatten(0, 1) @ head.detach().t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self._log_draft = torch.log_softmax(logits, dim=-1).unflatten(0, hidden.shape[:2])

    def scores(self, exists: Tensor, greedy_sampled: "AcceptanceProducts") -> DraftScores:
        """Returns the scores. Those of predictions for which `exists`, bool [m, depth], is False are 0."""
        self._exists = exists
        taught, real = self._taught, exists.to(self._log_draft.dtype)
        cross_entropy = -torch.bmm(self._log_draft, taught.of_draft.unsqueeze(-1)).squeeze(-1) * real
        acceptance = torch.minimum(self._drafted, self._target).sum(-1) * real
        said = self._vocabulary[self._log_draft.argmax(-1)]
        correct = (said == taught.likeliest[:, None]) * real
        covered = taught.covered[:, None] * real
        greedy, sampled = greedy_sampled.after(correct, acceptance, exists)
        return DraftScores(cross_entropy, acceptance, correct, covered, real, greedy, sampled)

    def backward(self, slopes: DraftGradients) -> Tensor:
        """Returns the gradient by hidden, [m, depth, size]. Slopes of predictions that do not exist are ignored."""
        of_cross_entropy, of_acceptance = (
            slope.masked_fill(~self._exists, 0.0) for slope in (slopes.cross_entropy, slopes.acceptance)
        )
        drafted = self._drafted
        gradient = (drafted - self._taught.of_draft[:, None]) * of_cross_entropy.unsqueeze(-1)
        if bool(of_acceptance.any()):
            below = drafted * (drafted < self._target)
            gradient += (below - drafted * below.sum(-1, keepdim=True)) * of_acceptance.unsqueeze(-1)
        flat = gradient.flatten(0, 1).to(self._hidden.dtype)
        if self._head.grad is not None:
            add_product(self._head.grad, flat, self._hidden.flatten(0, 1))
        return (flat @ self._head.detach()).unflatten(0, self._hidden.shape[:2])

    @cached_property
    def _drafted(self) -> Tensor:
        """Returns the draft's distribution, [m, depth, V]."""
        return self._log_draft.exp()

    @property
    def _target(self) -> Tensor:
        """Returns the target's distribution, [m, 1, V]. It sums to the probability of the draft's vocabulary."""
        return (self._taught.of_draft * self._taught.share)[:, None]


class AcceptanceProducts:
    """Running products of `correct` and `acceptance` over the draft tokens that were predicted from the same token."""

    def __init__(self, num_places: int, like: Tensor) -> None:
        # The last position collects predictions that do not exist.
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._greedy = torch.ones(num_places + 1, device=like.device, dtype=dtype)
        self._sampled = self._greedy.clone()
        self._places = torch.empty(0)

    def at(self, places: Tensor) -> "AcceptanceProducts":
        """Sets the tokens from which the next predictions start, int64 [m, depth]. Returns itself."""
        self._places = places
        return self

    def after(self, correct: Tensor, acceptance: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the products and returns them, [m, depth] each. Column k must be predicted before column k + 1."""
        nowhere = len(self._greedy) - 1
        columns: tuple[list[Tensor], list[Tensor]] = [], []
        for step in range(correct.shape[1]):
            at = torch.where(exists[:, step], self._places[:, step], nowhere)
            for product, factor, found in zip(
                (self._greedy, self._sampled), (correct, acceptance), columns, strict=True
            ):
                product[at] *= factor[:, step]
                found.append(product[at] * exists[:, step])
        return torch.stack(columns[0], dim=1), torch.stack(columns[1], dim=1)
