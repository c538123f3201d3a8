"""DFlash: a draft that predicts a block of tokens in parallel from the target's hidden states at the tokens before.

Chen et al., DFlash (2026), https://arxiv.org/abs/2602.06036. In a sequence x_0, x_1, ..., a block with anchor a
consists of the known token x_a and of mask tokens in place of x_(a+1), x_(a+2), .... It reads the target's features up
to a - 1, and position k of the block predicts x_(a+k). Embedding and output head are the target's. Parameter names are
those of the released drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig
from ...losses.draft_scores import DraftGradients, DraftScores
from ...models.model import BaseModel
from ...ops.attention import AttentionKind
from ...ops.kv_cache import CachedRow
from ...parallel.collectives import copy_to_team, reduce_from_team
from ...parallel.mesh import ALONE, Team
from ...state.parameter import ModelParameter
from ..sequences.block_attention import KeyValues, attend_blocks
from ..sequences.blocks import Blocks
from ..sequences.captured_features import TargetRepr
from ..sequences.drafting import DraftLengths, Draw, TargetEnds, TargetStates
from ..sequences.features import DraftInputs, TargetHead
from ..sequences.labels import Labels, Options
from ..sequences.sequence_shard import shard_slice
from .algorithm import Tensors
from .draft_shape import DraftShape, with_defaults
from .logit_budget import LogitBudget
from .modules import normed, rotated, rotation, swiglu_mlp

_BLOCK_SIZE = 16

# Each draft token adds to the target's verification pass, and the late ones of a block are seldom accepted.
_USUAL_GUESSES = 7

# Cosines and sines of a rotation.
Turn = tuple[Tensor, Tensor]

# Maps the blocks' queries, keys and values to the output of attention.
Attended = Callable[[Tensor, KeyValues], Tensor]


class DFlash:
    """Implements DraftAlgorithm for DFlash drafts."""

    target_repr: TargetRepr | None = None

    def draft_lengths(self, shape: DraftShape) -> DraftLengths:
        assert shape.block_size is not None
        most = shape.block_size - 1
        return DraftLengths(min(most, _USUAL_GUESSES), most, shape.block_size)

    def lookahead(self, options: Options) -> int:
        """Returns 0: a block reads only its anchor token, which is sent to the rank that has the block."""
        return 0

    def with_defaults(self, config: DraftConfig, target: PreTrainedConfig, vocab_size: int) -> DraftConfig:
        """Fills in the defaults.

        The draft captures as many layers as it has, evenly spaced from the target's second to its third last, or the
        middle one if it has a single layer. The mask is the target's padding token, or else its last token; a token
        that occurs in no text is best.
        """
        if config.draft_vocab_size not in (None, vocab_size):
            raise OperationError(
                f"draft_vocab_size is {config.draft_vocab_size}: a dflash draft predicts all {vocab_size} tokens with"
                " the target's output head: leave draft_vocab_size out"
            )
        found = with_defaults(config, target, vocab_size, 1)
        text = target.get_text_config()
        mask = _mask_token(text, vocab_size) if config.mask_token_id is None else config.mask_token_id
        if mask >= vocab_size:
            raise OperationError(
                f"mask_token_id is {mask}: the target has tokens 0 to {vocab_size - 1}: choose one that no text has"
            )
        assert found.num_layers is not None
        captured = found.capture_layers or _spaced(int(text.num_hidden_layers), found.num_layers)
        own = {"capture_layers": captured, "block_size": found.block_size or _BLOCK_SIZE, "mask_token_id": mask}
        return found.model_copy(update=own)

    def inference_config(self, config: DraftConfig) -> Mapping[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": config.block_size,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.capture_layers or ()),
            },
        }

    def parameters(self, shape: DraftShape) -> Sequence[ModelParameter]:
        shapes = {"fc": (shape.hidden, shape.captured * shape.hidden), "hidden_norm": (shape.hidden,)}
        for layer in range(shape.layers):
            shapes |= {f"layers.{layer}.{name}": size for name, size in _layer_shapes(shape).items()}
        shapes["norm"] = (shape.hidden,)
        return [ModelParameter(f"{name}.weight", f"{name}.weight", size) for name, size in shapes.items()]

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        """Sets norms to 1, and draws all else such that outputs are about as large as inputs."""
        for weight in parameters.values():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.empty(weight.shape).normal_(std=weight.shape[1] ** -0.5, generator=generator))

    def network(
        self,
        shape: DraftShape,
        parameters: Tensors,
        vocabulary: Tensor,
        recomputes: bool = False,
        team: Team = ALONE,
    ) -> "DFlashNetwork":
        """Returns the draft's modules. All activations are kept, since blocks are few however long a sequence is."""
        return DFlashNetwork(shape, parameters, team)


class DFlashNetwork:
    """The modules of a DFlash draft."""

    def __init__(self, shape: DraftShape, parameters: Tensors, team: Team) -> None:
        assert shape.block_size is not None
        self.shape, self.parameters, self._team = shape, parameters, team
        self.block_size = shape.block_size

    def training_pass(self, features: DraftInputs, labels: Labels, options: Options, room: LogitBudget) -> "DFlashPass":
        assert features.head is not None
        blocks = Blocks.sampled(features.packing, labels, options, self.block_size)
        own, depth = blocks.select(features.shard.round_robin), self.block_size - 1
        chunk_rows = room.rows_of(depth, depth * self.shape.target_vocabulary)
        return DFlashPass(self.predictions(features, blocks), own, features.head, labels, chunk_rows, self._team)

    def predictions(self, features: DraftInputs, blocks: Blocks) -> Tensor:
        """Returns the output head's input for each token of the blocks, [m, size, hidden]; the first position of a
        block is unused.

        Where ranks share a sequence, the result covers this rank's blocks only.
        """
        stretch = features.shard
        known, blocks = _embedded_anchors(features, blocks)[stretch.round_robin], blocks.select(stretch.round_robin)
        steps = torch.arange(blocks.size, device=blocks.anchors.device)
        positions = features.positions[blocks.anchors, None] + steps
        assert features.mask is not None
        state = self._inputs(known, features.mask)
        places = positions.flatten(), features.positions[stretch.own]
        turn, context_turn = (self._rotation(each, state.dtype) for each in places)
        context = self._context(features.captured)
        for layer in range(self.shape.layers):
            own_memory = self._memory(context, f"layers.{layer}", context_turn)
            memory = KeyValues(*(stretch.joined(each) for each in own_memory))

            def attended(query: Tensor, own: KeyValues, memory: KeyValues = memory) -> Tensor:
                return attend_blocks(query, memory, own, blocks, self.shape.scaling)

            state = self._layer(state, f"layers.{layer}", turn, attended)
        return self._head_input(state).unflatten(0, (-1, blocks.size))

    def extend_cache(self, told: TargetStates, ends: TargetEnds) -> None:
        context = self._context(told.captured)
        turn = self._rotation(told.positions(), context.dtype)
        for layer in range(self.shape.layers):
            key, value = self._memory(context, f"layers.{layer}", turn)
            for chunk in told.chunks:
                chunk.store(key, value, layer)

    def propose(self, told: TargetStates, num_draft_tokens: int, ends: TargetEnds, draw: Draw) -> None:
        """Drafts all tokens at once, with a block whose anchor is the last token of each sequence.

        The target's features at the anchor are not known yet. The block has all its masks even if fewer draft tokens
        are requested, as in training.
        """
        self.extend_cache(told, ends)
        hidden = self._block(told, ends)[:, 1 : num_draft_tokens + 1]
        for logits in ends.logits(hidden).unbind(1):
            draw(logits)

    def _block(self, told: TargetStates, ends: TargetEnds) -> Tensor:
        """Returns the output head's input, [m, size, hidden]; the first position is unused."""
        size, last = self.block_size, told.last()
        anchors = told.next_tokens[last]
        embedded = ends.embedded(torch.cat([anchors, anchors.new_tensor([self.shape.mask_token])]))
        state = self._inputs(embedded[:-1], embedded[-1])
        positions = told.positions()[last, None] + 1 + torch.arange(size, device=last.device)
        turn = self._rotation(positions.flatten(), state.dtype)
        chunks = told.scratch_chunks(size, is_causal=False)
        row = CachedRow((), chunks, None, len(state), ())
        for layer in range(self.shape.layers):
            kind = AttentionKind(layer, self.shape.scaling)

            def attended(query: Tensor, own: KeyValues, kind: AttentionKind = kind) -> Tensor:
                return row.attend(query, *own, kind)

            state = self._layer(state, f"layers.{layer}", turn, attended)
        return self._head_input(state).unflatten(0, (-1, size))

    def _inputs(self, known: Tensor, mask: Tensor) -> Tensor:
        """Returns [m * size, hidden]: for each block its embedded anchor, from `known` [m, hidden], and then masks."""
        masks = mask.expand(len(known), self.block_size - 1, -1)
        return torch.cat([known[:, None], masks], dim=1).flatten(0, 1)

    def _context(self, captured: Tensor) -> Tensor:
        """Projects the target's features to the context that all layers read."""
        return copy_to_team(self._normed(linear(captured, self.parameters["fc.weight"]), "hidden_norm"), self._team)

    def _layer(self, state: Tensor, prefix: str, turn: Turn, attended: Attended) -> Tensor:
        """Runs one layer."""
        x = copy_to_team(self._normed(state, f"{prefix}.input_layernorm"), self._team)
        query = rotated(self._normed_heads(x, f"{prefix}.self_attn.q"), *turn)
        found = attended(query, self._memory(x, prefix, turn)).flatten(1)
        state = state + reduce_from_team(
            linear(found, self.parameters[f"{prefix}.self_attn.o_proj.weight"]), self._team
        )
        x = self._normed(state, f"{prefix}.post_attention_layernorm")
        return state + swiglu_mlp(x, self.parameters, f"{prefix}.mlp", self._team)

    def _head_input(self, state: Tensor) -> Tensor:
        """Returns the output head's input. It includes the scale of the target's logits."""
        normed, scale = self._normed(state, "norm"), self.shape.logit_scale
        return normed if scale == 1 else normed * scale

    def _memory(self, x: Tensor, prefix: str, turn: Turn) -> KeyValues:
        """Returns keys and values. The target's features and the blocks' tokens use the same projections."""
        key = rotated(self._normed_heads(x, f"{prefix}.self_attn.k"), *turn)
        return KeyValues(key, self._heads(x, f"{prefix}.self_attn.v"))

    def _normed_heads(self, x: Tensor, name: str) -> Tensor:
        return self._normed(self._heads(x, name), f"{name}_norm")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.parameters[f"{name}_proj.weight"]).unflatten(-1, (-1, self.shape.head_dim))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.parameters[f"{name}.weight"], self.shape.eps)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        frequencies, scale = self.shape.rotation(positions.device)
        return rotation(positions, frequencies.to(torch.promote_types(dtype, frequencies.dtype)), scale, dtype)


class DFlashPass:
    """A pass with one row for each block: its draft tokens, which are predicted in parallel.

    They are trained on the tokens of the text, so the acceptance of a draft token is the draft's probability of the
    text's token. Where ranks share layers, each rank scores some of the blocks.
    """

    def __init__(
        self, outputs: Tensor, blocks: Blocks, head: TargetHead, labels: Labels, chunk_rows: int, team: Team = ALONE
    ) -> None:
        self._outputs, self._head, self._labels = outputs, head, labels
        self.chunk_rows = chunk_rows
        self._places, self._exists = blocks.target_positions(), blocks.exists()
        self._depth = blocks.size - 1
        self._team, self._scored = team, shard_slice(len(outputs), team.index, team.size)
        self._slopes = torch.zeros_like(outputs) if outputs.requires_grad else None
        self._log_draft = torch.empty(0)
        self._acceptance = torch.empty(0)
        self._rows = slice(0, 0)

    @property
    def num_rows(self) -> int:
        return self._scored.stop - self._scored.start

    def scores(self, rows: slice) -> DraftScores:
        self._rows = rows = self._among_all(rows)
        exists = self._exists[rows]
        logits = self._head.logits(self._outputs.detach()[rows, 1:].flatten(0, 1))
        self._log_draft = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        cross_entropy = -self._log_draft.gather(1, self._tokens()).view(exists.shape)
        cross_entropy = cross_entropy.masked_fill(~exists, 0.0)
        real = exists.to(cross_entropy.dtype)
        self._acceptance = (-cross_entropy).exp() * real
        correct = (self._log_draft.argmax(-1, keepdim=True) == self._tokens()).view(exists.shape) * real
        products = correct.cumprod(1), self._acceptance.cumprod(1)
        return DraftScores(cross_entropy, self._acceptance, correct, real, real, *products)

    def weights(self, rows: slice) -> Tensor:
        """Returns the weights of the predicted tokens, 0 where a block reaches beyond its sequence."""
        rows = self._among_all(rows)
        return self._labels.weights[self._places[rows]] * self._exists[rows]

    def places(self, rows: slice) -> Tensor:
        return self._places[self._among_all(rows)]

    def backward(self, slopes: DraftGradients) -> None:
        """Computes the gradients. They are exactly 0 where no token is predicted or the slopes are 0, even if logits
        are not finite."""
        assert self._slopes is not None
        has_slope = self._exists[self._rows] & ((slopes.cross_entropy != 0) | (slopes.acceptance != 0))
        of_log = (self._acceptance * slopes.acceptance - slopes.cross_entropy).masked_fill(~has_slope, 0.0).view(-1, 1)
        gradient = self._log_draft.exp_().neg_()
        gradient.scatter_add_(1, self._tokens(), torch.ones_like(of_log)).mul_(of_log)
        gradient.masked_fill_(~has_slope.view(-1, 1), 0.0)
        of_hidden = self._head.backward(gradient).view(-1, self._depth, self._outputs.shape[-1])
        self._slopes[self._rows, 1:] = of_hidden.to(self._slopes.dtype)

    def close(self) -> None:
        assert self._slopes is not None
        torch.autograd.backward(self._outputs, self._team.all_reduce(self._slopes))

    def _among_all(self, rows: slice) -> slice:
        return slice(self._scored.start + rows.start, self._scored.start + rows.stop)

    def _tokens(self) -> Tensor:
        """Returns the tokens to predict, int64 [rows * depth, 1]; an arbitrary one where no token is predicted."""
        return self._labels.targets[self._places[self._rows]].view(-1, 1)


def _embedded_anchors(features: DraftInputs, blocks: Blocks) -> Tensor:
    """Returns the embedded anchors, [m, hidden], including those in other ranks' shards."""
    if features.stretch is None:
        return features.embedded[blocks.anchors]
    own = features.stretch.own
    is_here = (blocks.anchors >= own.start) & (blocks.anchors < own.stop)
    found = features.embedded.new_zeros(len(blocks.anchors), features.embedded.shape[1])
    found[is_here] = features.embedded[blocks.anchors[is_here] - own.start]
    return features.stretch.summed(found)


def _layer_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }


def _spaced(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` evenly spaced layers, or fewer if the target has fewer."""
    if count == 1:
        return (num_layers // 2,)
    first = min(1, num_layers - 1)
    last = max(first, num_layers - 3)
    return tuple(sorted({round(first + number * (last - first) / (count - 1)) for number in range(count)}))


def _mask_token(text: PreTrainedConfig, vocab_size: int) -> int:
    padding, ends = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    stands_in_texts = padding == ends or (isinstance(ends, list) and padding in ends)
    return padding if isinstance(padding, int) and 0 <= padding < vocab_size and not stands_in_texts else vocab_size - 1
