"""EAGLE-3: a draft of one layer that continues from the target's hidden states, unrolled in training as in drafting.

Li et al., EAGLE-3 (2025), https://arxiv.org/abs/2503.01840. In a sequence x_0 .. x_T, the draft predicts x_(t+2),
x_(t+3), ... from token t. Draft token i reads the embedding of x_(t+1+i) and the draft's own state after the draft
token before; the first one reads a projection of the target's hidden states at t. It learns the target's distribution
at t+1+i. Parameter names are those of published drafts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig
from ....schemas.training import TargetRepr
from ...models.model import BaseModel
from ...ops.attention import AttendingPacking, AttentionKind, attend
from ...ops.kv_cache import CachedRow, ContinuationChunk
from ...parallel.collectives import copy_to_team
from ...parallel.mesh import ALONE, Team
from ...shapes.draft_sizes import eagle3_shapes
from ...shapes.logit_budget import LogitBudget
from ...state.parameter import ModelParameter
from ..losses.draft_scores import DraftGradients, DraftScores
from ..sequences.drafting import DraftLengths, Draw, TargetEnds, TargetStates
from ..sequences.features import DraftInputs, Labels, Options
from ..sequences.sequence_shard import SequenceShard, shard_slice
from ..sequences.unrolled_attention import attend_unrolled
from .algorithm import Tensors
from .draft_shape import DraftShape, with_defaults
from .draft_token_chunk import AcceptanceProducts, DraftTokenChunk
from .modules import DraftModules, initialize, rotated

_LAYER = "midlayer"


class Eagle3:
    """Implements DraftAlgorithm for EAGLE-3 drafts."""

    default_target_repr: TargetRepr | None = "hidden_state"
    scoring_parameters: Collection[str] = ("lm_head.weight",)

    def draft_lengths(self, shape: DraftShape) -> DraftLengths:
        return DraftLengths(default=4, most=16)

    def lookahead(self, options: Options) -> int:
        """Returns the unroll length: each further draft token from a position reads one more token after it."""
        return int(options["ttt_length"])

    def with_defaults(self, config: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> DraftConfig:
        """Fills in the defaults. The draft captures a layer near the first, one in the middle and one near the last."""
        if config.num_layers not in (None, 1):
            raise OperationError(f"num_layers is {config.num_layers}: an eagle3 draft has 1 layer")
        for name in ("block_size", "mask_token_id"):
            if getattr(config, name) is not None:
                raise OperationError(f"{name} is a setting of dflash, not of eagle3: leave it out")
        num_layers = int(target.get_text_config().num_hidden_layers)
        defaults = {min(1, num_layers - 1), max(0, num_layers // 2 - 1), max(0, num_layers - 4)}
        captured = config.capture_layers or tuple(sorted(defaults))
        resolved = with_defaults(config, target, vocab_size, 1).model_copy(update={"capture_layers": captured})
        return _with_target_repr(resolved, vocab_size)

    def inference_config(self, config: DraftConfig) -> Mapping[str, Any]:
        """Returns the config entries of published drafts.

        vLLM reads the first list of layers, where 0 is the input of the first layer; SGLang reads the second one, where
        0 is the output of that layer.
        """
        layers = list(config.capture_layers or ())
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
        }

    def parameters(self, shape: DraftShape) -> Sequence[ModelParameter]:
        shapes = eagle3_shapes(shape)
        return [ModelParameter(f"{name}.weight", f"{name}.weight", size) for name, size in shapes.items()]

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        """Copies the target's output head, and initializes the rest."""
        for name, weight in parameters.items():
            if name == "lm_head.weight":
                weight.copy_(base.unembedding[vocabulary])
            else:
                initialize(weight, generator)

    def network(
        self,
        shape: DraftShape,
        parameters: Tensors,
        vocabulary: Tensor,
        recomputes: bool = False,
        team: Team = ALONE,
    ) -> "Eagle3Network":
        return Eagle3Network(shape, parameters, vocabulary, recomputes, team)


class Eagle3Network(DraftModules):
    """The modules of an EAGLE-3 draft."""

    def __init__(
        self, shape: DraftShape, parameters: Tensors, vocabulary: Tensor, recomputes: bool, team: Team
    ) -> None:
        super().__init__(shape, parameters, team)
        self.vocabulary, self._recomputes = vocabulary, recomputes
        self._kind = AttentionKind(0, shape.scaling)

    def training_pass(self, inputs: DraftInputs, labels: Labels, options: Options, budget: LogitBudget) -> "Eagle3Pass":
        depth, shape = int(options["ttt_length"]), self.shape
        chunk_rows = budget.chunk_rows(depth, max(depth * shape.vocabulary, shape.target_vocabulary))
        return Eagle3Pass(self, self.unrolled(inputs, depth), inputs, labels, chunk_rows)

    def unrolled(self, inputs: DraftInputs, depth: int) -> list[Tensor]:
        """Returns the output head's input for each step of the unrolling, [tokens, hidden].

        The row is that of the token from which the draft continues. Rows of draft tokens beyond the end of a sequence
        are meaningless.
        """
        shard, outputs = inputs.shard, []
        positions = inputs.positions[shard.own]
        state = self._initial_state(inputs.captured[: len(positions)])
        of_embeddings, of_states = self._halves()
        of_embedded = self._projected(inputs.embedded, "input_layernorm", of_embeddings)
        rows = torch.arange(len(state), device=state.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(depth):
            # The embedding that the step reads; beyond the end, any.
            ahead = (rows + step + 1).clamp_(max=len(inputs.embedded) - 1)
            of_state = self._run(self._projected, state, "hidden_norm", of_states)
            query, key, value = (self.split_heads(a[ahead] + b) for a, b in zip(of_embedded, of_state, strict=True))
            cos_sin = self.cos_sin(positions + step, state.dtype)
            query, key = rotated(query, *cos_sin), rotated(key, *cos_sin)
            keys.append(key if step else self._by_heads(key, shard))
            values.append(value if step else self._by_heads(value, shard))
            attended = attend_unrolled(query, keys, values, inputs.packing, self._kind, shard)
            state, output = self._run(self._layer_output, state, attended)
            outputs.append(output)
        return outputs

    def extend_cache(self, observed: TargetStates, ends: TargetEnds) -> None:
        self._first_step(observed, ends)

    def propose(self, observed: TargetStates, num_draft_tokens: int, ends: TargetEnds, draw: Draw) -> None:
        """Drafts the tokens one after the other, each continuing from the one before."""
        last = observed.last()
        state, hidden = (each[last] for each in self._first_step(observed, ends))
        positions = observed.positions()[last]
        for number in range(num_draft_tokens):
            tokens = draw(linear(hidden, self.parameters["lm_head.weight"]))
            if number < num_draft_tokens - 1:
                positions = positions + 1
                cache = _cached_packing(observed.scratch_chunks(1, number))
                state, hidden = self._step(state, ends.embedded(tokens), positions, cache)

    def _run(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a part of the unrolling. To recompute, only its arguments are kept, and it runs again in the backward
        pass, with the same numbers to the last bit: drafts draw no random numbers, so no random state is restored.

        Chen et al., Training deep nets with sublinear memory cost (2016), https://arxiv.org/abs/1604.06174.
        """
        if not self._recomputes:
            return part(*arguments)
        return checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)

    def _first_step(self, observed: TargetStates, ends: TargetEnds) -> tuple[Tensor, Tensor]:
        state, embedded = self._initial_state(observed.captured), ends.embedded(observed.next_tokens)
        return self._step(state, embedded, observed.positions(), _cached_packing(observed.chunks))

    def _initial_state(self, captured: Tensor) -> Tensor:
        """Returns the state before the first draft token, [tokens, hidden]: the projected features of the target."""
        return linear(captured, self.parameters["fc.weight"])

    def _step(
        self, state: Tensor, embedded: Tensor, positions: Tensor, packing: AttendingPacking
    ) -> tuple[Tensor, Tensor]:
        """Runs one drafting step over tokens of many sequences.

        Args:
            state: [tokens, hidden], before the tokens.
            embedded: [tokens, hidden], the tokens that follow.
            positions: int64 [tokens].
        Returns:
            The state after the tokens, and the output head's input.
        """
        of_embeddings, of_states = self._halves()
        of_embedded = self._projected(embedded, "input_layernorm", of_embeddings)
        of_state = self._projected(state, "hidden_norm", of_states)
        query, key, value = (self.split_heads(a + b) for a, b in zip(of_embedded, of_state, strict=True))
        cos_sin = self.cos_sin(positions, state.dtype)
        attended = attend(rotated(query, *cos_sin), rotated(key, *cos_sin), value, packing, self._kind)
        return self._layer_output(state, attended)

    def _layer_output(self, state: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        state = self.finish_layer(state, attended, _LAYER)
        return state, self.normed(state, "norm")

    def _halves(self) -> tuple[list[Tensor], list[Tensor]]:
        """Splits the query, key and value weights into those of the embedding and those of the state.

        The views are made once for all steps, so that backward assembles the gradient of the whole once.
        """
        weights = [self.parameters[f"{_LAYER}.self_attn.{name}_proj.weight"] for name in "qkv"]
        hidden = self.shape.hidden
        return [weight[:, :hidden] for weight in weights], [weight[:, hidden:] for weight in weights]

    def _projected(self, x: Tensor, norm: str, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns one half's part of query, key and value. The part of the embeddings is the same in every step."""
        x = copy_to_team(self.normed(x, f"{_LAYER}.{norm}"), self.team)
        return [linear(x, weight) for weight in weights]

    def _by_heads(self, x: Tensor, shard: SequenceShard) -> Tensor:
        repeats = shard.kv_repeats(self.shape.heads // self.team.size, self.shape.kv_heads // self.team.size)
        return shard.by_heads(x if repeats == 1 else x.repeat_interleave(repeats, dim=1))


class Eagle3Pass:
    """A pass with one row for each token: the predictions of the token after it, from the tokens before it.

    Rows are left out if neither their token nor the tokens that are predicted through it have a weight. Where ranks
    share a sequence, predictions start at this rank's tokens, and rows reach into the tokens after them. Where ranks
    share layers, each rank scores the predictions that start at some of the tokens.
    """

    def __init__(
        self, network: Eagle3Network, outputs: Sequence[Tensor], inputs: DraftInputs, labels: Labels, chunk_rows: int
    ) -> None:
        self._network, self._outputs, self._inputs, self._labels = network, outputs, inputs, labels
        self._gradients = [torch.zeros_like(output) for output in outputs] if outputs[0].requires_grad else []
        self.chunk_rows, self._first = chunk_rows, inputs.shard.own.start
        # The outputs that this rank scores.
        self._scored = shard_slice(len(outputs[0]), network.team.index, network.team.size)
        self._products = AcceptanceProducts(len(outputs[0]), outputs[0])
        self._all_rows = self._weighted_rows()
        self._chunk: DraftTokenChunk | None = None
        self._rows = slice(0, 0)

    @property
    def num_rows(self) -> int:
        return len(self._all_rows)

    def scores(self, rows: slice) -> DraftScores:
        self._rows = rows
        sources, exists, network = self._sources(), self._exists(), self._network
        hidden = torch.stack([each.detach()[sources[:, i]] for i, each in enumerate(self._outputs)], dim=1)
        # States that belong to another sequence may not be finite, and 0 * inf is NaN.
        hidden = hidden.masked_fill_(~exists.unsqueeze(-1), 0.0)
        head = network.parameters["lm_head.weight"]
        target = self._inputs.distribution(self._all_rows[rows])
        self._chunk = DraftTokenChunk(hidden, head, network.vocabulary, target, exists)
        return self._chunk.scores(self._products, sources)

    def weights(self, rows: slice) -> Tensor:
        return self._labels.weights[self._tokens(rows), None].expand(-1, len(self._outputs))

    def label_indices(self, rows: slice) -> Tensor:
        return self._tokens(rows)[:, None].expand(-1, len(self._outputs))

    def backward(self, gradients: DraftGradients) -> None:
        assert self._chunk is not None
        of_hidden, sources = self._chunk.backward(gradients), self._sources()
        for i, gradient in enumerate(self._gradients):
            gradient.index_add_(0, sources[:, i], of_hidden[:, i])

    def close(self) -> None:
        for gradient in self._gradients:
            self._network.team.all_reduce(gradient)
        torch.autograd.backward(self._outputs, self._gradients)

    def _weighted_rows(self) -> Tensor:
        """Returns the rows that have a weight: int64, ascending, indices into the tokens that this rank has features
        of. The first of these are the tokens with an output."""
        scored, depth, device = self._scored, len(self._outputs), self._inputs.positions.device
        num_tokens = len(self._inputs.positions) - self._first
        stop = min(scored.stop + depth, num_tokens) if scored.start < scored.stop else scored.start
        counts = torch.nn.functional.pad((self._labels.weights[self._first :] != 0).cumsum(0), (1, depth))
        # Counts weights of a row and of the rows that predictions through it reach.
        counts[num_tokens + 1 :] = counts[num_tokens]
        rows = torch.arange(scored.start, stop, device=device)
        return rows[counts[rows + depth] > counts[rows]]

    def _sources(self) -> Tensor:
        """Returns the tokens from which predictions started, int64 [m, depth]; any where this rank has none."""
        return self._unbounded_sources().clamp_(0, len(self._outputs[0]) - 1)

    def _exists(self) -> Tensor:
        """Returns bool [m, depth]: True where the starting token is in the same sequence and on this rank."""
        sources = self._unbounded_sources()
        steps = torch.arange(sources.shape[1], device=sources.device)
        is_here = (sources >= self._scored.start) & (sources < self._scored.stop)
        return is_here & (self._inputs.positions[self._tokens(self._rows), None] > steps)

    def _unbounded_sources(self) -> Tensor:
        steps = torch.arange(len(self._outputs), device=self._inputs.positions.device)
        return self._all_rows[self._rows, None] - 1 - steps

    def _tokens(self, rows: slice) -> Tensor:
        return self._first + self._all_rows[rows]


def _with_target_repr(config: DraftConfig, vocab_size: int) -> DraftConfig:
    """Fills in `target_repr` of an otherwise resolved configuration. Raises OperationError if it cannot be done."""
    top_k, size = config.target_top_k, config.draft_vocab_size
    if config.target_repr != "pruned_logits":
        if top_k is not None:
            raise OperationError(f"target_top_k is {top_k}: it is only for target_repr 'pruned_logits': leave it out")
        return config.model_copy(update={"target_repr": config.target_repr or Eagle3.default_target_repr})
    if top_k is None and size == vocab_size:
        raise OperationError(
            f"target_repr 'pruned_logits' prunes to the draft's vocabulary, which has all {vocab_size} tokens of the"
            " target: set draft_vocab_size or target_top_k, or choose 'logits'"
        )
    if top_k is not None and top_k >= vocab_size:
        raise OperationError(
            f"target_top_k is {top_k}, and the target has {vocab_size} tokens: lower it, or choose target_repr 'logits'"
        )
    return config


def _cached_packing(chunks: Sequence[ContinuationChunk]) -> CachedRow:
    return CachedRow((), chunks, None, chunks[-1].stop, ())
