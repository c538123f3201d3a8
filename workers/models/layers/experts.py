"""The experts of a sparse layer: tokens go to the ranks that have their experts, and run in grouped products.

The rows of each expert are sorted by adapter, so that all adapters' terms are grouped products too. Fedus et al.,
Switch Transformers (2021); Lepikhin et al., GShard (2020), section 3.2.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops.grouped_gemm import GroupedRows
from ...ops.kernels import FEW_ROWS, ExpertFactors, Kernels, kernels_for, load_kernels
from ...parallel.collectives import ResidualStream, all_to_all_rows, reduce_from_team
from ...parallel.mesh import Team
from ...shapes.parts import RoutedExperts
from .expert_weights import ExpertWeights, activation_of


class AdapterTerms(Protocol):
    """The adapters' terms for the experts of one layer, with rows sorted like the experts' rows.

    reduced: the rows of SharedAdapterTerms.reduce, and the result of `add_down` is what add_expanded takes, before it
    is weighted and summed; both are None if the experts of no adapter share anything.
    """

    @property
    def needs_inputs(self) -> bool:
        """True if `gate_up_backward` needs x."""
        ...

    def add_gate_up(self, y: Tensor, x: Tensor, reduced: Tensor | None) -> None: ...

    def add_down(self, y: Tensor, x: Tensor) -> Tensor | None: ...

    def gate_up_backward(
        self, grad: Tensor, x: Tensor | None, reduced: Tensor | None, grad_x: Tensor | None
    ) -> Tensor | None:
        """Returns the gradient of `reduced`."""
        ...

    def down_backward(self, grad: Tensor, grad_z: Tensor | None, x: Tensor, grad_x: Tensor) -> None: ...


class SharedAdapterTerms(Protocol):
    """The products with what adapters share for all experts of a layer, by token."""

    def reduce(self, x: Tensor, anchor: Tensor) -> Tensor:
        """Returns what the gates and ups of a token's experts add to, [tokens, n], for x [tokens, hidden]."""
        ...

    def add_expanded(self, y: Tensor, z: Tensor) -> Tensor:
        """Returns y [tokens, hidden], overwritten, plus the terms of the weighted sum z of AdapterTerms.add_down."""
        ...


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

    def terms(self, layer: str, counts: Tensor, num_rows: int, has_bare: bool) -> AdapterTerms: ...

    def shared_terms(self, layer: str) -> SharedAdapterTerms | None: ...

    def own_factors(self, layer: str, num_experts: int) -> Sequence[Tensor] | None:
        """Returns the factors of ExpertFactors, or None if the terms of some tokens are others."""
        ...


class ActiveAdapters(Protocol):
    """The active plan, and a leaf that makes outputs require a gradient."""

    anchor: Tensor

    @property
    def experts(self) -> AdapterPlan | None: ...


class GroupedExperts:
    """Runs transformers' experts, of which each rank of a team has some.

    linears: the names of an expert's gate (if it has one), up and down in files. router: maps tokens to the logits of
    all experts, the weights and the numbers of those that are chosen; None if transformers' own layers choose them.
    part: their declaration, None if they run in transformers' own layers.
    """

    def __init__(
        self, experts: Any, team: Team, linears: tuple[str, ...], router: Any = None, part: RoutedExperts | None = None
    ) -> None:
        self.linears = linears
        self._router, self._experts, self._team = router, experts, team
        activation = activation_of(experts, part)
        assert activation is not None, f"{type(experts).__name__} computes something else"
        self._weights = ExpertWeights(experts, activation, part)
        self._active: ActiveAdapters | None = None
        self._name = ""

    @property
    def num_experts(self) -> int:
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
        quantize(self._experts, *self.matrices)

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the two parameters with the matrices of all experts."""
        return self._weights.names

    def forward(self, x: Tensor, stream: ResidualStream | None = None, latents: Tensor | None = None) -> Tensor:
        """Returns the layer's output [tokens, hidden] for x [tokens, hidden].

        Args:
            stream: see forward_routed.
            latents: what experts map, [tokens, n], if that is not x; the output is of this shape, too.
        """
        _, weights, chosen = self._router(x)
        return self.forward_routed(x if latents is None else latents, chosen, weights, stream)

    def forward_routed(
        self, x: Tensor, chosen: Tensor, weights: Tensor, stream: ResidualStream | None = None
    ) -> Tensor:
        """Returns the experts' weighted outputs [tokens, hidden], like `forward` after routing.

        Args:
            chosen: the experts of each token, [tokens, experts of each].
            weights: factors of their outputs, of the same shape.
            stream: of the layer; None if all ranks of the team have the same tokens, which nothing counts.
        """
        if stream is not None and stream.expert_counts is not None:
            stream.expert_counts.add(self, chosen, self.num_experts)
        keys = self._keys(chosen)
        if stream is None or stream.ep_ranks_share_tokens or self._team.size == 1:
            routed = None if torch.is_grad_enabled() else self._run_fused(x, keys, weights)
            if routed is not None:
                return reduce_from_team(routed, self._team)
            pairs = _LocalPairs(keys, self._num_own, self._num_kinds, self._team)
            return reduce_from_team(self._run(x, weights, pairs), self._team)
        return self._run(x, weights, _ExchangedPairs(keys, self._num_own, self._num_kinds, self._team))

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
        if plan is None:
            return chosen
        return chosen * self._num_kinds + plan.kinds(len(chosen))[:, None]

    def _run_fused(self, x: Tensor, keys: Tensor, weights: Tensor) -> Tensor | None:
        """Returns the result of `_run` by one kernel; None if there is none for these experts, adapters or tensors."""
        matrices = self._weights.plain if keys.numel() <= FEW_ROWS * self._num_own else None
        plan, num_own = self._active.experts if self._active is not None else None, self._num_own
        own = plan.own_factors(self._name, num_own) if matrices is not None and plan is not None else ()
        kernels = None if matrices is None or own is None else kernels_for(x, weights, *matrices, *own)
        if kernels is None or matrices is None or own is None:
            return None
        first = self._team.index * num_own * self._num_kinds
        if self._active is None or plan is None or not own:
            return kernels.run_experts(x, keys, weights, *matrices, first, None)[0]
        shared = plan.shared_terms(self._name)
        assert shared is not None
        factors = ExpertFactors(shared.reduce(x, self._active.anchor), *own)
        y, z = kernels.run_experts(x, keys, weights, *matrices, first, factors)
        assert z is not None
        return shared.add_expanded(y, z)

    def _run(self, x: Tensor, weights: Tensor, pairs: "_RoutedPairs") -> Tensor:
        """Returns the weighted sums [tokens, hidden] of the outputs of this rank's pairs, or of all pairs if exchanged,
        for x [tokens, hidden]."""
        plan = self._active.experts if self._active is not None else None
        if self._active is None or plan is None:
            of_pairs, _ = _ExpertMlp.apply(x, None, None, self._weights, pairs, None)
            return pairs.combine([of_pairs], weights)[0]
        anchor = self._active.anchor
        terms = plan.terms(self._name, pairs.counts, pairs.num_rows, pairs.has_unadapted(plan))
        shared = plan.shared_terms(self._name)
        reduced = None if shared is None else shared.reduce(x, anchor)
        of_pairs = _ExpertMlp.apply(x, reduced, anchor, self._weights, pairs, terms)
        y, *z = pairs.combine([each for each in of_pairs if each is not None], weights)
        return y if shared is None else shared.add_expanded(y, *z)


class _RoutedPairs(Protocol):
    """Pairs of token and expert on this rank, sorted by expert and kind, which is the adapter or none.

    counts: int64 [own experts, kinds]. groups: the pairs of each expert. num_rows: of all pairs, including those at the
    end that are not this rank's.
    """

    counts: Tensor
    groups: GroupedRows
    num_rows: int

    def gather(self, of_tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the rows of all pairs [pairs, n] of each [tokens, n], without a gradient."""
        ...

    def gather_backward(self, of_pairs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients [tokens, n], given those of the gathered rows."""
        ...

    def combine(self, of_pairs: Sequence[Tensor], weights: Tensor) -> Sequence[Tensor]:
        """Returns the sums [tokens, n], weighted by [tokens, experts of each], of what pairs have, [pairs, n]."""
        ...

    def has_unadapted(self, plan: AdapterPlan) -> bool:
        """True if some pairs may have no adapter."""
        ...


class _LocalPairs:
    """Pairs of the tokens that this rank has; those of other ranks' experts are sorted to the end."""

    def __init__(self, keys: Tensor, num_own: int, num_kinds: int, team: Team) -> None:
        """Sorts the pairs by `keys`, expert * num_kinds + kind, int64 [tokens, experts of each]."""
        first, num_groups = team.index * num_own * num_kinds, num_own * num_kinds
        kernels = load_kernels() if keys.is_cpu and keys.dtype == torch.int64 else None
        sort = _sort_pairs if kernels is None else kernels.sort_pairs
        self._tokens, self._places, counts = sort(keys, first, num_groups)
        self._shape, self.counts = keys.shape, counts.view(num_own, num_kinds)
        self.num_rows = keys.numel()
        self.groups = GroupedRows(counts if num_kinds == 1 else self.counts.sum(1))

    def gather(self, of_tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        return [each.index_select(0, self._tokens) for each in of_tokens]

    def gather_backward(self, of_pairs: Sequence[Tensor]) -> Sequence[Tensor]:
        if (kernels := kernels_for(*of_pairs)) is not None:
            ones = of_pairs[0].new_ones(self._shape)
            return [kernels.combine_pairs(each, self._places, ones) for each in of_pairs]
        return [_by_token(each, self._places, self._shape).sum(1) for each in of_pairs]

    def combine(self, of_pairs: Sequence[Tensor], weights: Tensor) -> Sequence[Tensor]:
        if (kernels := kernels_for(weights, *of_pairs)) is not None:
            weights = weights.expand(self._shape)
            if torch.is_grad_enabled():
                return [_Combined.apply(each, self._places, weights, kernels) for each in of_pairs]  # pyright: ignore
            return [kernels.combine_pairs(each, self._places, weights) for each in of_pairs]
        return [_weighted(_by_token(each, self._places, self._shape), weights) for each in of_pairs]

    def has_unadapted(self, plan: AdapterPlan) -> bool:
        return plan.has_unadapted


class _ExchangedPairs:
    """Pairs that any rank of a team has for this rank's experts: their rows are sent here, and the outputs back.

    All that pairs have is sent in one exchange.
    """

    def __init__(self, keys: Tensor, num_own: int, num_kinds: int, team: Team) -> None:
        """Exchanges the counts of pairs with the team and sorts them. For `keys` see _LocalPairs."""
        number, num_groups = keys.flatten(), num_own * num_kinds
        self._team, self._shape, order = team, keys.shape, number.argsort(stable=True)
        self._tokens, self._places = order // keys.shape[1], _inverse(order)
        counts = number.bincount(minlength=num_groups * team.size)
        # Rows that each rank sends for each of this rank's groups: [ranks, own groups].
        arriving = team.all_to_all(counts).view(team.size, -1)
        self._sent, self._received = counts.view(team.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        self.num_rows = sum(self._received)
        self._sorted = _group_of_each(arriving).argsort(stable=True)
        self._arrived = _inverse(self._sorted)
        self.counts = arriving.sum(0).view(num_own, num_kinds)
        self.groups = GroupedRows(self.counts.sum(1))

    def gather(self, of_tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        sent = _joined(of_tokens).index_select(0, self._tokens)
        arrived = self._team.all_to_all(sent, self._sent, self._received).index_select(0, self._sorted)
        return arrived.split(_columns(of_tokens), dim=1)

    def gather_backward(self, of_pairs: Sequence[Tensor]) -> Sequence[Tensor]:
        sent = _joined(of_pairs).index_select(0, self._arrived)
        returned = self._team.all_to_all(sent, self._received, self._sent)
        by_token = _by_token(returned, self._places, self._shape).sum(1)
        return by_token.split(_columns(of_pairs), dim=1)

    def combine(self, of_pairs: Sequence[Tensor], weights: Tensor) -> Sequence[Tensor]:
        returned = all_to_all_rows(_joined(of_pairs)[self._arrived], self._team, self._received, self._sent)
        by_token = _by_token(returned, self._places, self._shape)
        return [_weighted(each, weights) for each in by_token.split(_columns(of_pairs), dim=-1)]

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
        reduced: Tensor | None,
        anchor: Tensor | None,
        weights: ExpertWeights,
        pairs: _RoutedPairs,
        terms: AdapterTerms | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the experts' outputs [pairs, hidden] for x [tokens, hidden], with zeros for pairs of other ranks, and
        the result of AdapterTerms.add_down. For `reduced` [tokens, n] see AdapterTerms."""
        rows, *of_reduced = pairs.gather([x] if reduced is None else [x, reduced])
        activation, features = weights.activation, weights.features(pairs.groups, rows)
        if terms is not None:
            terms.add_gate_up(features, rows, *of_reduced or [None])
        del rows
        hidden = activation(*activation.parts(features))
        y = weights.output(pairs.groups, hidden)
        z = None if terms is None else terms.add_down(y, hidden)
        ctx.weights, ctx.pairs, ctx.terms = weights, pairs, terms
        reads_x = weights.are_learned or (terms is not None and terms.needs_inputs)
        ctx.save_for_backward(x if reads_x else None, reduced, features)
        return y, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrites the saved features, which nothing else reads, since backward runs once."""
        x, reduced, features = ctx.saved_tensors
        weights, pairs, terms, grad = ctx.weights, ctx.pairs, ctx.terms, grads[0].contiguous()
        parts = weights.activation.parts(features)
        grad_hidden = weights.output_backward(pairs.groups, grad)
        if terms is not None or weights.are_learned:
            hidden = weights.activation(*parts)
            weights.add_output_gradients(pairs.groups, grad, hidden)
            if terms is not None:
                terms.down_backward(grad, grads[1], hidden, grad_hidden)
            del hidden
        weights.activation.overwrite(grad_hidden, *parts)
        del grad_hidden
        if weights.are_learned:
            weights.add_features_gradients(pairs.groups, features, *pairs.gather([x]))
        grad_rows = weights.features_backward(pairs.groups, features) if ctx.needs_input_grad[0] else None
        grad_reduced = None
        if terms is not None:
            rows, of_reduced = _regathered(pairs, x, reduced)
            grad_reduced = terms.gate_up_backward(features, rows, of_reduced, grad_rows)
        given = [each for each in (grad_rows, grad_reduced) if each is not None]
        found = iter(pairs.gather_backward(given) if given else ())
        of_x, of_reduced = (None if each is None else next(found) for each in (grad_rows, grad_reduced))
        return of_x, of_reduced, None, None, None, None


class _Combined(torch.autograd.Function):
    """Runs Kernels.combine_pairs."""

    @staticmethod
    def forward(ctx: Any, of_pairs: Tensor, places: Tensor, weights: Tensor, kernels: Kernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(of_pairs, places, weights)
        return kernels.combine_pairs(of_pairs, places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        grad_x, grad_weights = ctx.kernels.combine_pairs_gradient(grads[0], *ctx.saved_tensors)
        return grad_x, None, grad_weights, None


def _sort_pairs(keys: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes Kernels.sort_pairs."""
    number = keys.flatten() - first
    number = torch.where((number >= 0) & (number < num_groups), number, num_groups)
    order = number.argsort(stable=True)
    # `bincount` would wait for the GPU.
    counts = number.new_zeros(num_groups + 1).scatter_add_(0, number, torch.ones_like(number))
    return order // keys.shape[1], _inverse(order), counts[:num_groups]


def _regathered(pairs: _RoutedPairs, *of_tokens: Tensor | None) -> list[Tensor | None]:
    """Returns the rows of all pairs of each tensor, None where that is None."""
    found = iter(pairs.gather(given) if (given := [each for each in of_tokens if each is not None]) else ())
    return [None if each is None else next(found) for each in of_tokens]


def _group_of_each(arriving: Tensor) -> Tensor:
    """Returns the group of each row in order of arrival, from the rows' counts `arriving` [ranks, groups]."""
    groups = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return groups.repeat_interleave(arriving.flatten())


def _by_token(of_pairs: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Reorders [pairs, n] to [tokens, experts of each, n]."""
    return of_pairs[places].view(*shape, of_pairs.shape[1])


def _weighted(by_token: Tensor, weights: Tensor) -> Tensor:
    """Returns the sums [tokens, n] of [tokens, experts of each, n], weighted by [tokens, experts of each]."""
    return (by_token * weights.unsqueeze(-1)).sum(1).to(by_token.dtype)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)


def _columns(tensors: Sequence[Tensor]) -> list[int]:
    return [each.shape[1] for each in tensors]


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
