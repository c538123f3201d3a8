"""The weights of a base on this rank: whole or sharded, quantized, or replaced by those of a model trained on it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from ...schemas.errors import OperationError
from ..ops.frozen.packing import pack
from ..ops.frozen.quantized import QuantizedWeight, replace_parameter
from ..ops.frozen.released import ReleasedWeight
from ..ops.linear import to_product_layout
from ..parallel.mesh import Mesh, Team
from ..parallel.sharded_embedding import ShardedEmbedding
from ..protocol.worker_config import WorkerConfig, ZeroStage
from ..resources.machine import gigabytes
from ..resources.memory import available_bytes
from .fsdp import GatherBuffers, ShardedLayer, ShardedLayers
from .fused_decoder import FusedTrunk, Trunk
from .loading import LoadedModel

_log = logging.getLogger(__name__)


class ModelWeights:
    """The weights of a loaded model, which can be quantized, gathered and replaced under the layers that use them."""

    def __init__(self, loaded: LoadedModel, layers: Trunk, config: WorkerConfig, mesh: Mesh) -> None:
        self._loaded, self._layers, self._mesh = loaded, layers, mesh
        self._model = loaded.model
        self._quantization = config.base_quantization
        self._quantized: list[QuantizedWeight | ReleasedWeight] = []
        self._num_unpacked = 0
        self.is_sharded = bool(loaded.placed.sharded)
        self._sharded, self._biases_of_others = loaded.placed.sharded, loaded.placed.biases_of_others
        own = self.own_parameters()
        self.num_parameters = sum(self._num_parts(name) * each.numel() for name, each in own.items())
        """The number on all ranks together."""
        self._zero_stage: ZeroStage = config.zero_stage
        self.num_moves = 0
        """Counts the times that the weights that layers use got other places in memory."""
        head = self._model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(f"{config.model.source}: the output head must be a linear layer, got {head}")
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self.head_name = names[id(head.weight)]
        """The name of the unembedding's parameter."""
        self.embedding_name = names[id(self._model.get_input_embeddings().weight)]
        if self.head_name not in (self.embedding_name, *self._sharded):
            # A tied head keeps its memory layout, because the embedding reads its rows one by one.
            head.weight.data = to_product_layout(head.weight.data)
        self.unembedding: Tensor = head.weight
        """[vocab, hidden], possibly tied to the embedding; this rank's rows if ranks keep it in parts, except inside
        `whole_unembedding` and `gathered`."""
        self.head_bias: Tensor | None = head.bias
        """Added to the logits, [vocab], whole on every rank; None if there is none."""
        self.head_names = frozenset(names[id(each)] for each in (head.weight, head.bias) if each is not None)
        """The names of the unembedding and of its bias."""
        self.vocab_size = self._num_parts(self.head_name) * len(head.weight)
        self._sharded_head: ShardedLayer | None = None

    def own_parameters(self) -> dict[str, Tensor]:
        """Returns this rank's parts of all parameters by name, sorted by name, with the same names on all ranks.

        Biases that another rank adds are included.
        """
        own = {name: parameter.data for name, parameter in self._model.named_parameters()} | self._biases_of_others
        return dict(sorted(own.items()))

    def _num_parts(self, name: str) -> int:
        """Returns the number of ranks' parts that make up the whole parameter of this name."""
        num_kept = self.shard_team.size if name in self._sharded else 1
        return num_kept * prod(split.size for split in self._loaded.splits.get(name, {}).values())

    @property
    def shard_team(self) -> Team:
        """The ranks that each keep a part of the parameters for which `is_fsdp_sharded` is true."""
        return self._mesh.shard_team

    def is_fsdp_sharded(self, name: str) -> bool:
        """True if each rank keeps some rows of this parameter, and gathers or requests the others for use."""
        return name in self._sharded

    @property
    def is_quantized(self) -> bool:
        return self._quantization != "none"

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights on this rank."""
        parameters = {id(parameter): parameter.nbytes for parameter in self._model.parameters()}
        return sum(parameters.values()) + sum(weight.nbytes for weight in self._quantized)

    def movable_tensors(self) -> list[Tensor]:
        """Returns all weights on this rank, after copying those in a mapped file to memory."""
        parameters = list(self._model.parameters())
        for parameter in parameters:
            if not parameter.data.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
        return [each.data for each in parameters] + [part for weight in self._quantized for part in weight.tensors]

    def quantize(self, module: nn.Module, *names: str) -> None:
        """Quantizes these parameters of the module, if the base is quantized.

        As released, those that the release does not hold packed stay as they are.
        """
        for name in names if self.is_quantized else ():
            parameter = module.get_parameter(name)
            quantized = self._quantized_weight(parameter)
            if quantized is None:
                self._num_unpacked += 1
                continue
            self._quantized.append(quantized)
            replace_parameter(module, name, quantized)

    def _quantized_weight(self, parameter: nn.Parameter) -> QuantizedWeight | ReleasedWeight | None:
        if self._quantization == "nf4":
            return QuantizedWeight(parameter.data)
        if parameter.dim() == 2:
            # The memory layout in which it would be multiplied if it were not packed.
            parameter.data = to_product_layout(parameter.data)
        return pack(parameter.data, self._loaded.shape.released.formats)

    def check_packed(self) -> None:
        """Raises ValueError if no weight under adapters is held as released."""
        if self._quantization != "released":
            return
        if not self._quantized:
            raise ValueError(
                f"{self._loaded.source}: none of its {self._num_unpacked} weights under adapters can be held as"
                " released: leave out --base-quantization released"
            )
        _log.info(
            "%s: %d weights are held as released, %d others as numbers of %s",
            *(self._loaded.source, len(self._quantized), self._num_unpacked, self._loaded.dtype),
        )

    @contextmanager
    def with_weights(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Replaces the parameters of these names by these tensors, this rank's parts, while inside.

        Args:
            gradients: float32, by name; backward passes add the weights' gradients to them.
        """
        parameters = {name: each for name, each in self._model.named_parameters() if name in weights}
        self.num_moves += 1
        with ExitStack() as held:
            held.callback(self._layers.parameters_changed, are_original=True)
            held.callback(_restore_parameters, [(each, each.data) for each in parameters.values()])
            for name, parameter in parameters.items():
                parameter.data = weights[name]
                if gradients is not None:
                    # Embeddings are never gathered, so that their gradients are this rank's part.
                    is_gathered = name in self._sharded and name not in self._embeddings
                    _collect_gradient(parameter, None if is_gathered else gradients[name])
            self._layers.parameters_changed(are_original=False)
            held.enter_context(self._layers.using_weights(gradients))
            with self._sparse_gradients(gradients is not None):
                yield

    @contextmanager
    def _sparse_gradients(self, is_wanted: bool) -> Iterator[None]:
        """Makes autograd's gradients of embeddings sparse while inside, not of the size of the vocabulary."""
        for embedding in self._embeddings.values():
            embedding.sparse = is_wanted
        try:
            yield
        finally:
            for embedding in self._embeddings.values():
                embedding.sparse = False

    @cached_property
    def _embeddings(self) -> Mapping[str, nn.Embedding]:
        """The embeddings by the names of their weights."""
        named = self._model.named_modules()
        return {f"{path}.weight": module for path, module in named if isinstance(module, nn.Embedding)}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps all layers whole while inside. All ranks enter together.

        Raises:
            OperationError: a rank has no memory for the whole model.
        """
        if (layers := self._layers.sharded) is None:
            yield
            return
        self._check_room(layers.num_whole_bytes)
        self.num_moves += 1
        with layers.gathered():
            yield

    def _check_room(self, num_bytes: int) -> None:
        free = [each for each in self._mesh.all_gather_object(available_bytes(self._loaded.device)) if each is not None]
        if free and min(free) < num_bytes:
            raise OperationError(
                f"to sample, each rank gathers the whole model, which takes {gigabytes(num_bytes)}, but one has only"
                f" {gigabytes(min(free))} free: serve the model with tp, or sample in separate workers"
                " (--sampler-workers)",
                "server",
            )

    def whole_unembedding(self) -> AbstractContextManager[None]:
        """Keeps the unembedding whole while inside, and its gradient if it has one. All ranks enter together."""
        return nullcontext() if self._sharded_head is None else self._sharded_head.in_use()

    def shard(self, trunk: FusedTrunk) -> None:
        buffers, numbers = GatherBuffers(), range(len(self._loaded.trunk.layers))  # pyright: ignore[reportArgumentType]
        prefixes = [f"{self._model.base_model_prefix}.layers.{number}." for number in numbers]
        by_layer = [[name for name in self._sharded if name.startswith(prefix)] for prefix in prefixes]
        layers = [self._sharded_layer(names, buffers) for names in by_layer if names]
        # A single name if they are tied.
        of_ends = sorted({*self._embeddings, self.head_name}.intersection(self._sharded))
        # Separate buffers, because no layer needs one of their size.
        ends = {name: self._sharded_layer([name], GatherBuffers()) for name in of_ends}
        self._sharded_head = ends.get(self.head_name)
        shared_out = {
            name: ShardedEmbedding(each, self.shard_team) for name, each in self._embeddings.items() if name in ends
        }
        embedding = shared_out.pop(self.embedding_name, None)
        of_layers = next(iter(shared_out.values()), None)
        trunk.shard(ShardedLayers(layers, self._zero_stage, list(ends.values())), embedding, of_layers)

    def _sharded_layer(self, names: Sequence[str], buffers: GatherBuffers) -> ShardedLayer:
        return ShardedLayer({name: self._model.get_parameter(name) for name in names}, self.shard_team, buffers)


def _restore_parameters(parameters: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, value in parameters:
        parameter.data, parameter.grad, parameter.requires_grad = value, None, False


def _collect_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Makes the parameter collect its gradient, which is None if the layer is gathered later with its gradient."""
    parameter.requires_grad = True
    parameter.grad_dtype = torch.float32
    parameter.grad = gradient
