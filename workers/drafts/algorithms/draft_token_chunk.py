"""Scores of draft tokens against the target's distribution, in chunks of rows: logits exist for one chunk at a time."""

from functools import cached_property

import torch
from torch import Tensor

from ...ops.linear import add_product
from ..losses.draft_scores import DraftGradients, DraftScores
from ..sequences.target_form import TargetDistribution


class DraftTokenChunk:
    """The draft's predictions for m rows, `depth` in each."""

    def __init__(
        self, hidden: Tensor, head: Tensor, vocabulary: Tensor, target: TargetDistribution, exists: Tensor
    ) -> None:
        """Computes the draft's log-probabilities.

        Args:
            hidden: [m, depth, size].
            head: [V, size]; its gradient is added to `head.grad` if it requires one.
            exists: bool [m, depth]; the scores of predictions for which it is False are 0.
        """
        self._hidden, self._head, self._vocabulary, self._target = hidden, head, vocabulary, target
        self._exists = exists
        logits = hidden.flatten(0, 1) @ head.detach().t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        self._log_probs = torch.log_softmax(logits, dim=-1).unflatten(0, hidden.shape[:2])

    def scores(self, products: "AcceptanceProducts", sources: Tensor) -> DraftScores:
        """Returns the scores.

        Args:
            products: those of the draft tokens before.
            sources: int64 [m, depth], the token from which each prediction started.
        """
        exists = self._exists.to(self._log_probs.dtype)
        cross_entropy = -torch.bmm(self._log_probs, self._target.restricted.unsqueeze(-1)).squeeze(-1) * exists
        acceptance = torch.minimum(self._probs, self._target_probs).sum(-1) * exists
        top_token = self._vocabulary[self._log_probs.argmax(-1)]
        correct = (top_token == self._target.top_token[:, None]) * exists
        covered = self._target.covered[:, None] * exists
        greedy, sampled = products.update(sources, correct, acceptance, self._exists)
        return DraftScores(cross_entropy, acceptance, correct, covered, exists, greedy, sampled)

    def backward(self, gradients: DraftGradients) -> Tensor:
        """Returns the gradient by hidden, [m, depth, size]. Gradients of predictions that do not exist are ignored."""
        of_cross_entropy, of_acceptance = (
            each.masked_fill(~self._exists, 0.0) for each in (gradients.cross_entropy, gradients.acceptance)
        )
        probs = self._probs
        of_logits = (probs - self._target.restricted[:, None]) * of_cross_entropy.unsqueeze(-1)
        if bool(of_acceptance.any()):
            below = probs * (probs < self._target_probs)
            of_logits += (below - probs * below.sum(-1, keepdim=True)) * of_acceptance.unsqueeze(-1)
        flat = of_logits.flatten(0, 1).to(self._hidden.dtype)
        if self._head.requires_grad:
            if self._head.grad is None:
                self._head.grad = torch.zeros_like(self._head, dtype=self._log_probs.dtype)
            add_product(self._head.grad, flat, self._hidden.flatten(0, 1))
        return (flat @ self._head.detach()).unflatten(0, self._hidden.shape[:2])

    @cached_property
    def _probs(self) -> Tensor:
        """Returns the draft's distribution, [m, depth, V]."""
        return self._log_probs.exp()

    @property
    def _target_probs(self) -> Tensor:
        """Returns the target's distribution, [m, 1, V]. It sums to the probability of the draft's vocabulary."""
        return (self._target.restricted * self._target.share)[:, None]


class AcceptanceProducts:
    """Running products of `correct` and `acceptance` over the draft tokens that were predicted from the same token."""

    def __init__(self, num_tokens: int, like: Tensor) -> None:
        # The last position collects predictions that do not exist.
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._greedy = torch.ones(num_tokens + 1, device=like.device, dtype=dtype)
        self._sampled = self._greedy.clone()

    def update(self, sources: Tensor, correct: Tensor, acceptance: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the products and returns them, [m, depth] each. Column k must be predicted before column k + 1.

        Args:
            sources: int64 [m, depth], the tokens from which the predictions start.
        """
        nowhere = len(self._greedy) - 1
        columns: tuple[list[Tensor], list[Tensor]] = [], []
        for step in range(correct.shape[1]):
            source = torch.where(exists[:, step], sources[:, step], nowhere)
            for product, factor, of_kind in zip(
                (self._greedy, self._sampled), (correct, acceptance), columns, strict=True
            ):
                product[source] *= factor[:, step]
                of_kind.append(product[source] * exists[:, step])
        return torch.stack(columns[0], dim=1), torch.stack(columns[1], dim=1)
