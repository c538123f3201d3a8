"""Checks that a loaded model can run packed rows.

Its modules must be of kinds that treat each token separately, except in attention, and a packed pass must give the
numbers of transformers' own passes over each sequence.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise, product
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..batch.micro_batch import MicroBatch, select_examples
from ..ops.attention import AttendingPacking, AttentionKind, Packing, attend, pack_lengths
from ..ops.recurrence import Recurrence, recur
from ..ops.token_index import IndexKind, IndexQueries, choose
from ..resources.memory import is_out_of_memory

Logits = Callable[[Tensor, Tensor, AttendingPacking], Tensor]
"""Maps tokens and positions, int64 [tokens], in a packing to logits [tokens, vocab]."""

# Lengths of the sequences that are compared; each is longer than the window that layers get for the check, and than
# what indexers choose then.
LENGTHS = [5, 11, 8]
_WINDOW = 4

# The largest distance allowed between log-probabilities, relative to their spread around the mean. Measured over the
# models of tests/workers/models/test_survey.py and SmolLM2-135M: rounding causes at most 4e-6 in float32, and 0.12 in
# bfloat16, where a router may choose another expert.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}

# Modules of torch and transformers that are known not to mix tokens.
_BY_TOKEN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential)
_HOMES = ("transformers.activations", "torch.nn.modules.activation")
# Endings of the class names of a model's own modules. Attention is checked by its numbers.
_ENDINGS = re.compile(r"(Attention|MLP|Norm(1P)?|Experts|Router|Gate|Gating|Statics|M[oO][eEA](Layer|Block)?)$")


def check_modules(source: str, model: PreTrainedModel) -> None:
    """Raises ValueError if a module below a layer is not known to mix tokens in attention alone."""
    for path, layer in _layers(model):
        for name, module in layer.named_modules():
            if name and not _is_plain(module):
                raise ValueError(
                    f"{source}: {model.config.model_type} models are not supported: {path}.{name} is a"
                    f" {type(module).__name__}, which may carry something from one sequence of a pass into the next"
                )


def check_numbers(
    source: str, model: PreTrainedModel, logits: Logits, longest: int | None, attending: Sequence[int]
) -> None:
    """Compares a packed pass of three short sequences with transformers' own pass over each of them.

    Args:
        logits: runs the packed pass.
        attending: the numbers of the layers with attention.
        longest: the longest context; shorter windows are reduced for the check, so that the sequences cross them.
    Raises:
        ValueError: the difference is more than rounding.
    """
    model_type = model.config.model_type
    try:
        with _short_windows(model, longest):
            distance = _distance(model, logits, attending)
    except Exception as error:  # a model of another shape may fail with anything
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{source}: {model_type} models are not supported: a packed pass fails with {type(error).__name__}: {error}"
        ) from error
    _refuse_distance(source, model, distance, "log-probabilities", "by transformers", _remedy(model, longest))


class RecordingPacking:
    """A packing that records the keys and values that layers pass to attention.

    A cache needs one key and one value of the same shape for each token of a layer.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._layers: list[int] = []

    @property
    def longest(self) -> int:
        return self._packing.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        self._layers.append(kind.layer)
        shapes = {tuple(key.shape[1:]), tuple(value.shape[1:])}
        if len(shapes) > 1:
            raise ValueError(f"keys and values have several shapes (heads, features): {sorted(shapes)}")
        return attend(query, key, value, self._packing, kind)

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        return recur(op, inputs, self._packing)

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        return choose(queries, key, self._packing, kind)

    def check(self, layers: Sequence[int]) -> None:
        """Raises ValueError if a cache could not store the keys and values of these layers, those with attention."""
        if self._layers != list(layers):
            raise ValueError(f"its layers {list(layers)} attend in the order {self._layers}, not once each")


def check_ranks(source: str, model: PreTrainedModel, hidden_states: Callable[[MicroBatch], Tensor]) -> None:
    """Compares a packed pass of the same sequences with single passes, by ranks that share the model.

    None of these ranks can run transformers' own pass.

    Args:
        hidden_states: returns the last ones of a micro-batch, [tokens, hidden]; all ranks call it together.
    Raises:
        ValueError: see `check_numbers`.
    """
    embedding: Any = model.get_input_embeddings()
    whole = _sequences(embedding.num_embeddings, embedding.weight.device)
    together = hidden_states(whole)
    alone = torch.cat([hidden_states(select_examples(whole, [bounds])) for bounds in _bounds()])
    _refuse_distance(source, model, _largest_distance(together.float(), alone.float()), "hidden states", "alone", "")


def _remedy(model: PreTrainedModel, longest: int | None) -> str:
    windows = sorted(_windows(model, longest))
    return f"; without its window it may be supported: serve with --max-context-length {windows[0]}" if windows else ""


def _refuse_distance(source: str, model: PreTrainedModel, distance: float, what: str, other: str, remedy: str) -> None:
    tolerance = TOLERANCES[model.dtype]
    if not distance <= tolerance:
        raise ValueError(
            f"{source}: this {model.config.model_type} model is not supported: {what} of sequences that share a pass"
            f" are {distance:.2g} of their spread away from those {other}, and rounding in"
            f" {str(model.dtype).removeprefix('torch.')} explains {tolerance:g}{remedy}"
        )


@torch.no_grad()
def _distance(model: PreTrainedModel, logits: Logits, attending: Sequence[int]) -> float:
    embedding: Any = model.get_input_embeddings()
    whole = _sequences(embedding.num_embeddings, embedding.weight.device)
    seen = RecordingPacking(whole.packing)
    ours = _centered(logits(whole.tokens, whole.positions, seen))
    seen.check(attending)
    with _operations_of_transformers(model):
        passes = [model(input_ids=whole.tokens[None, start:stop], use_cache=False) for start, stop in _bounds()]
    return _largest_distance(ours, _centered(torch.cat([each.logits[0] for each in passes])))


def _sequences(vocab_size: int, device: torch.device) -> MicroBatch:
    tokens = torch.randint(vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return MicroBatch(tokens.to(device), positions.to(device), Packing(pack_lengths(LENGTHS)), (), ())


def _bounds() -> list[tuple[int, int]]:
    return list(pairwise(accumulate(LENGTHS, initial=0)))


def _largest_distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the mean distance over the tokens of the sequence that is farthest off."""
    # All logits of a first token whose embedding is zero may be equal.
    spread = theirs.norm(dim=-1).clamp(min=torch.finfo(theirs.dtype).tiny)
    by_token = (ours - theirs).norm(dim=-1) / spread
    return max(float(by_token[start:stop].mean()) for start, stop in _bounds())


def _centered(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits - logits.mean(dim=-1, keepdim=True)


@contextmanager
def _operations_of_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model compute by transformers' operations, without our attention or an installed library's kernels."""
    ours: Any = model.config._attn_implementation
    module: Any = sys.modules[type(model).__module__]
    model.set_attn_implementation("eager")
    with ExitStack() as held:
        held.callback(model.set_attn_implementation, ours)
        for name, function in list(vars(module).items()):
            # Those that may be a library's are wrapped. Its kernels would take a while to compile, and need a GPU.
            is_own = inspect.isfunction(function) and function.__module__ == module.__name__
            if is_own and (plain := getattr(function, "__wrapped__", None)) is not None:
                held.callback(setattr, module, name, function)
                setattr(module, name, plain)
        yield


@contextmanager
def _short_windows(model: PreTrainedModel, longest: int | None) -> Iterator[None]:
    """Gives layers with a window that some sequence may cross one that the short sequences cross, while inside."""
    with ExitStack() as held:
        for owner, name in _settings(model):
            if _is_crossed(window := getattr(owner, name, None), longest):
                held.callback(setattr, owner, name, window)
                setattr(owner, name, _WINDOW)
        yield


def _windows(model: PreTrainedModel, longest: int | None) -> set[int]:
    windows = (getattr(owner, name, None) for owner, name in _settings(model))
    return {window for window in windows if _is_crossed(window, longest)}


def _settings(model: PreTrainedModel) -> Iterator[tuple[Any, str]]:
    """Yields the objects that may have a window, with the name of its length.

    The tokens that an indexer chooses are such a window too. In 16 bits rounding changes which they are, and it leaves
    them to `twin`.
    """
    names = ["sliding_window", "index_topk"] if model.dtype == torch.float32 else ["sliding_window"]
    yield from product(_owners(model), names)


def _is_crossed(window: object, longest: int | None) -> TypeGuard[int]:
    return isinstance(window, int) and window > 0 and (longest is None or window < longest)


def _owners(model: PreTrainedModel) -> list[Any]:
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    return [*configs.values(), *modules]


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers with their paths: the outermost list that has as many modules as the model has layers."""
    number = model.config.num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            yield from ((f"{path}.{i}", layer) for i, layer in enumerate(module))
            return
    raise ValueError(f"{model.config.model_type} models have no list of {number} layers")


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    if kind in _BY_TOKEN or kind is Conv1D or kind.__module__ in _HOMES:
        return True
    return kind.__module__.startswith("transformers.models.") and _ENDINGS.search(kind.__name__) is not None
