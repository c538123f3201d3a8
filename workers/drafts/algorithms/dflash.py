"""DFlash: a draft that predicts a block of tokens in parallel from the target's hidden states at the tokens before.

Chen et al., DFlash (2026), https://arxiv.org/abs/2602.06036. In a sequence x_0, x_1, ..., a block with anchor a
consists of the token x_a and of mask tokens in place of x_(a+1), x_(a+2), .... It reads the target's features up
to a - 1, and position k of the block predicts x_(a+k). Embedding and output head are the target's. Parameter names are
those of the released drafts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from ....schemas.errors import OperationError
from ....schemas.models import DraftConfig
from ....schemas.training import TargetRepr
from ...models.model import BaseModel
from ...ops.attention import AttentionKind
from ...ops.kv_cache import CachedRow
from ...parallel.collectives import copy_to_team
from ...parallel.mesh import ALONE, Team
from ...shapes.draft_sizes import dflash_shapes
from ...shapes.logit_budget import LogitBudget
from ...state.parameter import ModelParameter
from ..losses.draft_scores import DraftGradients, DraftScores
from ..sequences.block_attention import KeyValues, attend_blocks
from ..sequences.blocks import Blocks
from ..sequences.drafting import DraftLengths, Draw, TargetEnds, TargetStates
from ..sequences.features import DraftInputs, Labels, Options, TargetHead
from ..sequences.sequence_shard import shard_slice
from .algorithm import Tensors
from .draft_shape import DraftShape, with_defaults
from .modules import CosSin, DraftModules, initialize, rotated

_BLOCK_SIZE = 16

# Each draft token adds to the target's verification pass, and the late ones of a block are seldom accepted.
_DEFAULT_DRAFT_TOKENS = 7

# Maps the blocks' queries, keys and values to the output of attention.
BlockAttention = Callable[[Tensor, KeyValues], Tensor]


class DFlash:
    """Implements DraftAlgorithm for DFlash drafts."""

    default_target_repr: TargetRepr | None = None
    scoring_parameters: Collection[str] = ()

    def draft_lengths(self, shape: DraftShape) -> DraftLengths:
        assert shape.block_size is not None
        most = shape.block_size - 1
        return DraftLengths(min(most, _DEFAULT_DRAFT_TOKENS), most, shape.block_size)

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
        for name in ("target_repr", "target_top_k"):
            if (given := getattr(config, name)) is not None:
                raise OperationError(
                    f"{name} is {given!r}: a dflash draft learns the text's tokens and does not read its target's"
                    " distribution: leave it out"
                )
        resolved = with_defaults(config, target, vocab_size, 1)
        text = target.get_text_config()
        mask = _mask_token(text, vocab_size) if config.mask_token_id is None else config.mask_token_id
        if mask >= vocab_size:
            raise OperationError(
                f"mask_token_id is {mask}: the target has tokens 0 to {vocab_size - 1}: choose one that no text has"
            )
        assert resolved.num_layers is not None
        captured = resolved.capture_layers or _evenly_spaced(int(text.num_hidden_layers), resolved.num_layers)
        own = {"capture_layers": captured, "block_size": resolved.block_size or _BLOCK_SIZE, "mask_token_id": mask}
        return resolved.model_copy(update=own)

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
        shapes = dflash_shapes(shape)
        return [ModelParameter(f"{name}.weight", f"{name}.weight", size) for name, size in shapes.items()]

    def initialize(self, parameters: Tensors, base: BaseModel, vocabulary: Tensor, generator: torch.Generator) -> None:
        for weight in parameters.values():
            initialize(weight, generator)

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


class DFlashNetwork(DraftModules):
    """The modules of a DFlash draft."""

    def __init__(self, shape: DraftShape, parameters: Tensors, team: Team) -> None:
        assert shape.block_size is not None
        super().__init__(shape, parameters, team)
        self.block_size = shape.block_size

    def training_pass(self, inputs: DraftInputs, labels: Labels, options: Options, budget: LogitBudget) -> "DFlashPass":
        assert inputs.head is not None
        blocks = Blocks.sampled(inputs.packing, labels, options, self.block_size)
        own, depth = blocks.select(inputs.shard.round_robin), self.block_size - 1
        chunk_rows = budget.chunk_rows(depth, depth * self.shape.target_vocabulary)
        return DFlashPass(self.outputs(inputs, blocks), own, inputs.head, labels, chunk_rows, self.team)

    def outputs(self, inputs: DraftInputs, blocks: Blocks) -> Tensor:
        """Returns the output head's input for each token of the blocks, [m, size, hidden]; the first position of a
        block is unused.

        Where ranks share a sequence, the result covers this rank's blocks only.
        """
        shard = inputs.shard
        anchors, blocks = _embedded_anchors(inputs, blocks)[shard.round_robin], blocks.select(shard.round_robin)
        steps = torch.arange(blocks.size, device=blocks.anchors.device)
        positions = inputs.positions[blocks.anchors, None] + steps
        assert inputs.mask is not None
        state = self._block_inputs(anchors, inputs.mask)
        cos_sin = self.cos_sin(positions.flatten(), state.dtype)
        context_cos_sin = self.cos_sin(inputs.positions[shard.own], state.dtype)
        context = self._context(inputs.captured)
        for layer in range(self.shape.layers):
            own_context = self._key_values(context, f"layers.{layer}", context_cos_sin)
            key_values = KeyValues(*(shard.joined(each) for each in own_context))

            def attend(query: Tensor, own: KeyValues, key_values: KeyValues = key_values) -> Tensor:
                return attend_blocks(query, key_values, own, blocks, self.shape.scaling)

            state = self._layer(state, f"layers.{layer}", cos_sin, attend)
        return self._output(state).unflatten(0, (-1, blocks.size))

    def extend_cache(self, observed: TargetStates, ends: TargetEnds) -> None:
        context = self._context(observed.captured)
        cos_sin = self.cos_sin(observed.positions(), context.dtype)
        for layer in range(self.shape.layers):
            key, value = self._key_values(context, f"layers.{layer}", cos_sin)
            for chunk in observed.chunks:
                chunk.store(key, value, AttentionKind(layer, self.shape.scaling))

    def propose(self, observed: TargetStates, num_draft_tokens: int, ends: TargetEnds, draw: Draw) -> None:
        """Drafts all tokens at once, with a block whose anchor is the last token of each sequence.

        The target's features at the anchor do not exist yet. The block has all its masks even if fewer draft tokens are
        requested, as in training.
        """
        self.extend_cache(observed, ends)
        hidden = self._block(observed, ends)[:, 1 : num_draft_tokens + 1]
        for logits in ends.logits(hidden).unbind(1):
            draw(logits)

    def _block(self, observed: TargetStates, ends: TargetEnds) -> Tensor:
        """Returns the output head's input, [m, size, hidden]; the first position is unused."""
        size, last = self.block_size, observed.last()
        anchors = observed.next_tokens[last]
        embedded = ends.embedded(torch.cat([anchors, anchors.new_tensor([self.shape.mask_token])]))
        state = self._block_inputs(embedded[:-1], embedded[-1])
        positions = observed.positions()[last, None] + 1 + torch.arange(size, device=last.device)
        cos_sin = self.cos_sin(positions.flatten(), state.dtype)
        cache = CachedRow((), observed.scratch_chunks(size, is_causal=False), None, len(state), ())
        for layer in range(self.shape.layers):
            kind = AttentionKind(layer, self.shape.scaling)

            def attend(query: Tensor, own: KeyValues, kind: AttentionKind = kind) -> Tensor:
                return cache.attend(query, *own, kind)

            state = self._layer(state, f"layers.{layer}", cos_sin, attend)
        return self._output(state).unflatten(0, (-1, size))

    def _block_inputs(self, anchors: Tensor, mask: Tensor) -> Tensor:
        """Returns [m * size, hidden]: the embedded anchor of each block, from `anchors` [m, hidden], and its masks."""
        masks = mask.expand(len(anchors), self.block_size - 1, -1)
        return torch.cat([anchors[:, None], masks], dim=1).flatten(0, 1)

    def _context(self, captured: Tensor) -> Tensor:
        """Projects the target's features to the context that all layers read."""
        return copy_to_team(self.normed(linear(captured, self.parameters["fc.weight"]), "hidden_norm"), self.team)

    def _layer(self, state: Tensor, layer: str, cos_sin: CosSin, attend: BlockAttention) -> Tensor:
        x = copy_to_team(self.normed(state, f"{layer}.input_layernorm"), self.team)
        query = rotated(self._normed_heads(x, f"{layer}.self_attn.q"), *cos_sin)
        return self.finish_layer(state, attend(query, self._key_values(x, layer, cos_sin)), layer)

    def _output(self, state: Tensor) -> Tensor:
        """Returns the output head's input. It includes the scale of the target's logits."""
        normed, scale = self.normed(state, "norm"), self.shape.logit_scale
        return normed if scale == 1 else normed * scale

    def _key_values(self, x: Tensor, layer: str, cos_sin: CosSin) -> KeyValues:
        """Returns keys and values. The target's features and the blocks' tokens use the same projections."""
        key = rotated(self._normed_heads(x, f"{layer}.self_attn.k"), *cos_sin)
        return KeyValues(key, self._heads(x, f"{layer}.self_attn.v"))

    def _normed_heads(self, x: Tensor, name: str) -> Tensor:
        return self.normed(self._heads(x, name), f"{name}_norm")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return self.split_heads(linear(x, self.parameters[f"{name}_proj.weight"]))


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
        self._label_indices, self._exists = blocks.label_indices(), blocks.exists()
        self._depth = blocks.size - 1
        self._team, self._scored = team, shard_slice(len(outputs), team.index, team.size)
        self._gradient = torch.zeros_like(outputs) if outputs.requires_grad else None
        self._log_probs = torch.empty(0)
        self._acceptance = torch.empty(0)
        self._rows = slice(0, 0)

    @property
    def num_rows(self) -> int:
        return self._scored.stop - self._scored.start

    def scores(self, rows: slice) -> DraftScores:
        self._rows = rows = self._among_all(rows)
        exists = self._exists[rows]
        logits = self._head.logits(self._outputs.detach()[rows, 1:].flatten(0, 1))
        self._log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        cross_entropy = -self._log_probs.gather(1, self._tokens()).view(exists.shape)
        cross_entropy = cross_entropy.masked_fill(~exists, 0.0)
        exists = exists.to(cross_entropy.dtype)
        self._acceptance = (-cross_entropy).exp() * exists
        correct = (self._log_probs.argmax(-1, keepdim=True) == self._tokens()).view(exists.shape) * exists
        products = correct.cumprod(1), self._acceptance.cumprod(1)
        return DraftScores(cross_entropy, self._acceptance, correct, exists, exists, *products)

    def weights(self, rows: slice) -> Tensor:
        """Returns the weights of the predicted tokens, 0 where a block reaches beyond its sequence."""
        rows = self._among_all(rows)
        return self._labels.weights[self._label_indices[rows]] * self._exists[rows]

    def label_indices(self, rows: slice) -> Tensor:
        return self._label_indices[self._among_all(rows)]

    def backward(self, gradients: DraftGradients) -> None:
        """Computes the gradient by the outputs. It is exactly 0 where no token is predicted or the gradients by its
        scores are 0, even if logits are not finite."""
        assert self._gradient is not None
        counts = self._exists[self._rows] & ((gradients.cross_entropy != 0) | (gradients.acceptance != 0))
        of_log_probs = self._acceptance * gradients.acceptance - gradients.cross_entropy
        of_log_probs = of_log_probs.masked_fill(~counts, 0.0).view(-1, 1)
        of_logits = self._log_probs.exp_().neg_()
        of_logits.scatter_add_(1, self._tokens(), torch.ones_like(of_log_probs)).mul_(of_log_probs)
        of_logits.masked_fill_(~counts.view(-1, 1), 0.0)
        of_hidden = self._head.backward(of_logits).view(-1, self._depth, self._outputs.shape[-1])
        self._gradient[self._rows, 1:] = of_hidden.to(self._gradient.dtype)

    def close(self) -> None:
        assert self._gradient is not None
        torch.autograd.backward(self._outputs, self._team.all_reduce(self._gradient))

    def _among_all(self, rows: slice) -> slice:
        return slice(self._scored.start + rows.start, self._scored.start + rows.stop)

    def _tokens(self) -> Tensor:
        """Returns the tokens to predict, int64 [rows * depth, 1]; an arbitrary one where no token is predicted."""
        return self._labels.targets[self._label_indices[self._rows]].view(-1, 1)


def _embedded_anchors(inputs: DraftInputs, blocks: Blocks) -> Tensor:
    """Returns the embedded anchors, [m, hidden], including those in other ranks' shards."""
    if inputs.shard.team is None:
        return inputs.embedded[blocks.anchors]
    own = inputs.shard.own
    is_here = (blocks.anchors >= own.start) & (blocks.anchors < own.stop)
    embedded = inputs.embedded.new_zeros(len(blocks.anchors), inputs.embedded.shape[1])
    embedded[is_here] = inputs.embedded[blocks.anchors[is_here] - own.start]
    return inputs.shard.summed(embedded)


def _evenly_spaced(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` evenly spaced layers, or fewer if the target has fewer."""
    if count == 1:
        return (num_layers // 2,)
    first = min(1, num_layers - 1)
    last = max(first, num_layers - 3)
    return tuple(sorted({round(first + number * (last - first) / (count - 1)) for number in range(count)}))


def _mask_token(text: PreTrainedConfig, vocab_size: int) -> int:
    padding, ends = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    is_end = padding == ends or (isinstance(ends, list) and padding in ends)
    return padding if isinstance(padding, int) and 0 <= padding < vocab_size and not is_end else vocab_size - 1
