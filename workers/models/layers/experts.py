"""The experts of a sparse layer: tokens go to the ranks that have their experts, and run in grouped products.

The rows of each expert are sorted by adapter, so that all adapters' terms are grouped products too. Fedus et al.,
Switch Transformers (2021); Lepikhin et al., GShard (2020), section 3.2.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops.grouped_gemm import GroupedRows
from ...parallel.collectives import all_to_all_rows, reduce_from_team
from ...parallel.mesh import Team
from .expert_weights import ExpertWeights, activation_of


class AdapterTerms(Protocol):
    """The adapters' terms for the experts of one layer, with rows sorted like the experts' rows."""

    def add_gate_up(self, y: Tensor, x: Tensor) -> None: ...

    def add_down(self, y: Tensor, x: Tensor) -> None: ...

    def gate_up_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor | None) -> None: ...

    def down_backward(self, grad: Tensor, x: Tensor, grad_x: Tensor) -> None: ...


class AdapterPlan(Protocol):
    """Says which adapter each token of a packed row has at its experts."""

    adapters: Any

    @property
    def has_unadapted(self) -> bool:
        """True if some of the row's tokens have no adapter."""
        ...

    def kinds(self, num_tokens: int) -> Tensor:
        """Returns the place of each token's adapter in `adapters`, or their number if none: int64 [num_tokens]."""
        ...

    def terms(self, layer: str, counts: Tensor, has_bare: bool) -> AdapterTerms | None: ...


class ActiveAdapters(Protocol):
    """The active plan, and a leaf that makes outputs require a gradient."""

    anchor: Tensor

    @property
    def experts(self) -> AdapterPlan | None: ...


class RoutedExperts:
    """Runs transformers' experts, of which each rank of a team has some.

    linears: the names of an expert's gate, up and down in files. router: maps tokens to the logits of all experts, the
    weights and the numbers of those that are chosen; None if transformers' own layers choose the experts.
    """

    def __init__(self, experts: Any, team: Team, linears: tuple[str, str, str], router: Any = None) -> None:
        self.linears = linears
        self._router, self._experts, self._team = router, experts, team
        activation = activation_of(experts)
        assert activation is not None, f"{type(experts).__name__} computes something else"
        self._weights = ExpertWeights(experts, activation)
        self._active: ActiveAdapters | None = None
        self._name = ""

    @property
    def num_experts(self) -> int:
        """Experts on all ranks together."""
        return self._experts.num_experts

    @property
    def hidden_size(self) -> int:
        return self._weights.hidden_size

    @property
    def num_features(self) -> int:
        """Features of each expert, on all ranks together."""
        experts = self._experts
        return experts.intermediate_dim if hasattr(experts, "intermediate_dim") else experts.intermediate_size

    def adapt(self, active: ActiveAdapters, name: str) -> None:
        """Makes adapters add their terms from now on. `name` is the path of the experts in the causal LM."""
        self._active, self._name = active, name
        if self._router is None:
            self._experts.forward = self.forward_routed

    def quantize(self, quantize: Callable[..., None]) -> None:
        """Quantizes the experts' weights with a function that takes a module and names of its parameters."""
        quantize(self._experts, *self._weights.names)

    def forward(self, x: Tensor, same_tokens: bool) -> Tensor:
        """Returns the layer's output [tokens, hidden] for x [tokens, hidden].

        Args:
            same_tokens: whether all ranks of the team have the same tokens.
        """
        _, weights, chosen = self._router(x)
        return self.forward_routed(x, chosen, weights, same_tokens)

    def forward_routed(self, x: Tensor, chosen: Tensor, weights: Tensor, are_alike: bool = True) -> Tensor:
        """Returns the experts' weighted outputs [tokens, hidden], like `forward` after routing.

        Args:
            chosen: the experts of each token, [tokens, experts of each].
            weights: factors of their outputs, of the same shape.
        """
        keys = self._keys(chosen)
        if are_alike or self._team.size == 1:
            pairs = _LocalPairs(keys, self._num_own, self._num_kinds, self._team)
            return reduce_from_team(pairs.combine(self._mlp(x, pairs), weights), self._team)
        pairs = _ExchangedPairs(keys, self._num_own, self._num_kinds, self._team)
        return pairs.combine(self._mlp(x, pairs), weights)

    @property
    def _num_own(self) -> int:
        return self._weights.num_own

    @property
    def _num_kinds(self) -> int:
        """One for each adapter that adapts experts, and one for none."""
        plan = self._active.experts if self._active else None
        return 1 + (len(plan.adapters) if plan else 0)

    def _keys(self, chosen: Tensor) -> Tensor:
        """Returns the group, by expert and adapter, of each pair of token and expert: [tokens, experts of each]."""
        plan = self._active.experts if self._active else None
        if plan is None or not plan.adapters:
            return chosen
        return chosen * self._num_kinds + plan.kinds(len(chosen))[:, None]

    def _mlp(self, x: Tensor, pairs: "_RoutedPairs") -> Tensor:
        """Returns the experts' outputs [pairs, hidden] for x [tokens, hidden]; zeros for pairs of other ranks."""
        terms, anchor = None, None
        if self._active is not None and self._active.experts is not None:
            terms = self._active.experts.terms(self._name, pairs.counts, pairs.has_unadapted(self._active.experts))
            anchor = self._active.anchor if terms is not None else None
        y = _ExpertMlp.apply(x, anchor, self._weights, pairs, terms)
        assert isinstance(y, Tensor)
        return y


class _RoutedPairs(Protocol):
    """Pairs of token and expert on this rank, sorted by expert and kind, which is the adapter or none.

    counts: int64 [own experts, kinds]. groups: the pairs of each expert.
    """

    counts: Tensor
    groups: GroupedRows

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows of all pairs [pairs, hidden] for x [tokens, hidden], without a gradient."""
        ...

    def gather_backward(self, grad: Tensor) -> Tensor:
        """Returns the gradient of x [tokens, hidden], given the gradient of the gathered rows."""
        ...

    def combine(self, of_pairs: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum [tokens, hidden] of the experts' outputs [pairs, hidden]."""
        ...

    def has_unadapted(self, plan: AdapterPlan) -> bool:
        """True if some pairs may have no adapter."""
        ...


class _LocalPairs:
    """Pairs of the tokens that this rank has; those of other ranks' experts are sorted to the end."""

    def __init__(self, keys: Tensor, num_own: int, num_kinds: int, team: Team) -> None:
        """Sorts the pairs by `keys`, expert * num_kinds + kind, int64 [tokens, experts of each]."""
        number, num_groups = keys.flatten() - team.index * num_own * num_kinds, num_own * num_kinds
        if team.size > 1:
            number = torch.where((number >= 0) & (number < num_groups), number, num_groups)
        self._shape, order = keys.shape, number.argsort(stable=True)
        self._tokens, self._places = order // keys.shape[1], _inverse(order)
        self.counts = number.bincount(minlength=num_groups)[:num_groups].view(num_own, num_kinds)
        self.groups = GroupedRows(self.counts.sum(1))

    def gather(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._tokens)

    def gather_backward(self, grad: Tensor) -> Tensor:
        return _by_token(grad, self._places, self._shape).sum(1)

    def combine(self, of_pairs: Tensor, weights: Tensor) -> Tensor:
        return (_by_token(of_pairs, self._places, self._shape) * weights.unsqueeze(-1)).sum(1).to(of_pairs.dtype)

    def has_unadapted(self, plan: AdapterPlan) -> bool:
        return plan.has_unadapted


class _ExchangedPairs:
    """Pairs that any rank of a team has for this rank's experts: their rows are sent here, and the outputs back."""

    def __init__(self, keys: Tensor, num_own: int, num_kinds: int, team: Team) -> None:
        """Exchanges the counts of pairs with the team and sorts them. For `keys` see _LocalPairs."""
        number, num_groups = keys.flatten(), num_own * num_kinds
        self._team, self._shape, order = team, keys.shape, number.argsort(stable=True)
        self._tokens, self._places = order // keys.shape[1], _inverse(order)
        counts = number.bincount(minlength=num_groups * team.size)
        # Rows that each rank sends for each of this rank's groups: [ranks, own groups].
        arriving = team.all_to_all(counts).view(team.size, -1)
        self._sent, self._received = counts.view(team.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        self._sorted = _group_of_each(arriving).argsort(stable=True)
        self._arrived = _inverse(self._sorted)
        self.counts = arriving.sum(0).view(num_own, num_kinds)
        self.groups = GroupedRows(self.counts.sum(1))

    def gather(self, x: Tensor) -> Tensor:
        sent = x.index_select(0, self._tokens)
        return self._team.all_to_all(sent, self._sent, self._received).index_select(0, self._sorted)

    def gather_backward(self, grad: Tensor) -> Tensor:
        returned = self._team.all_to_all(grad.index_select(0, self._arrived), self._received, self._sent)
        return _by_token(returned, self._places, self._shape).sum(1)

    def combine(self, of_pairs: Tensor, weights: Tensor) -> Tensor:
        returned = all_to_all_rows(of_pairs[self._arrived], self._team, self._received, self._sent)
        return (_by_token(returned, self._places, self._shape) * weights.unsqueeze(-1)).sum(1).to(of_pairs.dtype)

    def has_unadapted(self, plan: AdapterPlan) -> bool:
        return bool(self.counts[:, -1].any())


class _ExpertMlp(torch.autograd.Function):
    """Computes the experts and their adapters' terms.

    backward adds to the adapters' scratch gradients, and to the `grad` of the experts' weights if they have one. It
    keeps the features, and the tokens if adapters need them; rows are gathered and activations computed a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        weights: ExpertWeights,
        pairs: _RoutedPairs,
        terms: AdapterTerms | None,
    ) -> Tensor:
        rows, activation = pairs.gather(x), weights.activation
        features = weights.features(pairs.groups, rows)
        if terms is not None:
            terms.add_gate_up(features, rows)
        del rows
        hidden = activation.value(*activation.parts(features))
        y = weights.output(pairs.groups, hidden)
        if terms is not None:
            terms.add_down(y, hidden)
        ctx.weights, ctx.pairs, ctx.terms = weights, pairs, terms
        ctx.save_for_backward(x if terms is not None or weights.are_learned else None, features)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrites the saved features, which nothing else reads, since backward runs once."""
        x, features = ctx.saved_tensors
        weights, pairs, terms, grad = ctx.weights, ctx.pairs, ctx.terms, grads[0].contiguous()
        parts = weights.activation.parts(features)
        grad_hidden = weights.output_backward(pairs.groups, grad)
        if terms is not None or weights.are_learned:
            hidden = weights.activation.value(*parts)
            weights.add_output_gradients(pairs.groups, grad, hidden)
            if terms is not None:
                terms.down_backward(grad, hidden, grad_hidden)
            del hidden
        weights.activation.overwrite(grad_hidden, *parts)
        del grad_hidden
        if weights.are_learned:
            weights.add_features_gradients(pairs.groups, features, pairs.gather(x))
        grad_rows = weights.features_backward(pairs.groups, features) if ctx.needs_input_grad[0] else None
        if terms is not None:
            terms.gate_up_backward(features, pairs.gather(x), grad_rows)
        return pairs.gather_backward(grad_rows) if grad_rows is not None else None, None, None, None, None


def _group_of_each(arriving: Tensor) -> Tensor:
    """Returns the group of each row in order of arrival, from the rows' counts `arriving` [ranks, groups]."""
    groups = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return groups.repeat_interleave(arriving.flatten())


def _by_token(of_pairs: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Reorders [pairs, hidden] to [tokens, experts of each, hidden]."""
    return of_pairs[places].view(*shape, -1)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
