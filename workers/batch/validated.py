"""Reads and validates the data of a request before anything is computed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.training import Datum, ForwardBackwardRequest
from ..losses import LOSSES, VALUE_LOSSES, Loss
from ..losses.loss import Config
from ..protocol.calls import DataShare
from ..protocol.plugins import plugin_rows

TARGETS = "target_tokens"


@dataclass(frozen=True)
class ModelLimits:
    vocab_size: int
    max_context_length: int


@dataclass(frozen=True, eq=False)
class Example:
    """A validated sequence.

    tokens: int64 [T]. targets: int64 [T] or [T, K]. inputs: float32, in the shape of the targets.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class ValidatedBatch:
    """A validated request, or a rank's share of a part of one.

    weight: a factor of the loss. num_tokens: positions that count in the loss. denominator: of the
    operation, see `denominator_of`. datum_indices: index of each example's datum in the whole operation.
    loss_key: equal for operations that are scored together, whose examples differ only in data.
    """

    loss_name: str
    loss: Loss
    config: Config
    weight: float
    examples: tuple[Example, ...]
    num_tokens: int
    denominator: float
    datum_indices: Sequence[int]
    loss_key: tuple[Hashable, ...]


def validate_request(
    request: ForwardBackwardRequest,
    limits: ModelLimits,
    share: DataShare | None = None,
    losses: Mapping[str, Loss] = LOSSES,
) -> ValidatedBatch:
    """Reads and validates a request.

    Args:
        share: the request's share of the whole operation's data, None = all.
        losses: the losses that this kind of model takes.
    Raises:
        OperationError: the request is invalid; the message names the datum, the value and the remedy.
    """
    share = share or DataShare(range(len(request.data)), len(request.data))
    if request.loss_fn not in losses:
        if request.loss_fn in {*LOSSES, *VALUE_LOSSES, *plugin_rows("workers.drafts.rows", "LOSSES")}:
            takes = _listed(losses)
            raise OperationError(f"loss_fn {request.loss_fn!r} is for another kind of model: this one takes {takes}")
        hint = _SYNONYMS.get(request.loss_fn.lower(), "")
        raise OperationError(f"unknown loss_fn {request.loss_fn!r}: use one of {_listed(losses)}{hint}")
    if not share.num_data:
        raise OperationError("the batch is empty: send at least one datum")
    loss, weight = losses[request.loss_fn], float(request.loss_weight)
    config = _read_config(request, loss)
    targets = []
    for i, datum in zip(share.indices, request.data, strict=True):
        _check_names(i, datum, request.loss_fn, loss)
        targets.append(_targets(datum, loss))
        _check_shapes(i, datum, targets[-1], request.loss_fn, loss, limits)
    _check_ids("model_input", [datum.tokens for datum in request.data], limits, share.indices)
    _check_ids(TARGETS, targets, limits, share.indices)
    examples = tuple(_example(datum, own, loss, config) for datum, own in zip(request.data, targets, strict=True))
    for name in (*loss.required, *loss.optional):
        _check_finite(name, request.data, examples, loss, share.indices)
    counts = [example.inputs[loss.counted_by] for example in examples]
    many_targets = any(each.ndim == 2 for each in targets)
    return ValidatedBatch(
        loss_name=request.loss_fn,
        loss=loss,
        config=config,
        weight=weight,
        examples=examples,
        num_tokens=sum(int(np.count_nonzero(each if each.ndim == 1 else (each != 0).any(axis=1))) for each in counts),
        denominator=denominator_of(loss, _joined(counts)),
        datum_indices=share.indices,
        loss_key=(request.loss_fn, *sorted(config.items()), weight, many_targets),
    )


def _read_config(request: ForwardBackwardRequest, loss: Loss) -> dict[str, Any]:
    config: dict[str, Any] = dict(loss.config) | {key: words[0] for key, words in loss.choices.items()}
    for key, value in request.loss_fn_config.items():
        if key not in config:
            raise OperationError(f"{request.loss_fn} has no config key {key!r}: {_allowed(config, key)}")
        if key in loss.choices:
            if value not in loss.choices[key]:
                raise OperationError(
                    f"{request.loss_fn} config {key} is {value!r}: it must be one of {_listed(loss.choices[key])}"
                )
            config[key] = value
            continue
        if isinstance(value, str) or not np.isfinite(value):
            raise OperationError(f"{request.loss_fn} config {key} is {value!r}: it must be a finite number")
        config[key] = float(value)
    if problem := loss.problem(config):
        raise OperationError(f"{request.loss_fn} config {problem}")
    return config


def _check_names(index: int, datum: Datum, loss_name: str, loss: Loss) -> None:
    required = (TARGETS, *loss.required) if loss.head == "logprobs" else loss.required
    if missing := [name for name in required if name not in datum.loss_fn_inputs]:
        other = _listed([name for name in datum.loss_fn_inputs if name not in (*required, *loss.optional)])
        given = f", and not {other}" if other else ""
        reads = f"{_inputs(required, loss)}{given}"
        raise OperationError(f"datum {index}: {loss_name} needs the input {_listed(missing)}: it reads {reads}")
    known = {*required, *loss.optional, *([TARGETS] if loss.head == "losses" else [])}
    if unknown := [name for name in datum.loss_fn_inputs if name not in known]:
        reads = _inputs(required, loss)
        raise OperationError(f"datum {index}: {loss_name} has no input {_listed(unknown)}: it reads {reads}")


def _check_shapes(
    index: int, datum: Datum, targets: np.ndarray, loss_name: str, loss: Loss, limits: ModelLimits
) -> None:
    tokens = datum.tokens
    length = len(tokens) if tokens.ndim == 1 else 0
    if not length:
        raise OperationError(f"datum {index}: model_input is empty: send at least one token")
    if length > limits.max_context_length:
        raise OperationError(
            f"datum {index}: model_input has {length} tokens, more than this model's context of"
            f" {limits.max_context_length}: shorten or split it"
        )
    for name, array in (("model_input", tokens), (TARGETS, targets)):
        if array.dtype.kind not in "iu":
            raise OperationError(f"datum {index}: {name} is {array.dtype}: token ids must be integers")
    if targets.ndim != 1 and not (loss.allows_top_k_targets and targets.ndim == 2 and targets.shape[1]):
        wanted = "[T] or [T, K]" if loss.allows_top_k_targets else "[T]"
        raise OperationError(f"datum {index}: {TARGETS} has shape {list(targets.shape)}: {loss_name} takes {wanted}")
    if loss.head == "losses" and len(targets) == length:
        _check_shifted_targets(index, tokens, targets, loss_name)
    if len(targets) != length:
        raise OperationError(
            f"datum {index}: {TARGETS} has {len(targets)} positions, model_input {length}: position i of the targets"
            " is predicted from model_input up to i, so the lengths must be equal"
        )
    for name, array in datum.loss_fn_inputs.items():
        if array.dtype.kind not in "fiub":
            raise OperationError(f"datum {index}: {name} is {array.dtype}: it must be numeric")
        if array.shape != targets.shape:
            like = TARGETS if loss.head == "logprobs" else "model_input"
            raise OperationError(
                f"datum {index}: {name} has shape {list(array.shape)}, {like} {list(targets.shape)}: they must be equal"
            )


def _check_shifted_targets(index: int, tokens: np.ndarray, targets: np.ndarray, loss_name: str) -> None:
    wrong = np.flatnonzero(targets[:-1] != tokens[1:])
    if len(wrong):
        at = int(wrong[0])
        raise OperationError(
            f"datum {index}: {TARGETS} has token id {targets[at]} at position {at}, model_input {tokens[at + 1]} at"
            f" {at + 1}: {loss_name} reads plain sequences, whose targets are model_input shifted by one; leave"
            f" {TARGETS} out to have them filled in"
        )


def _check_ids(name: str, arrays: list[np.ndarray], limits: ModelLimits, indices: Sequence[int]) -> None:
    ids = _joined(arrays)
    if not ids.size or (ids.min() >= 0 and ids.max() < limits.vocab_size):
        return
    at = int(np.argmax((ids < 0) | (ids >= limits.vocab_size)))
    datum, position = _find(at, arrays)
    remedy = "; give positions that should be ignored weight or advantage 0" if name == TARGETS else ""
    raise OperationError(
        f"datum {indices[datum]}: {name} has token id {ids[at]} at position {position}, outside the vocabulary of"
        f" {limits.vocab_size}: ids range from 0 to {limits.vocab_size - 1}{remedy}"
    )


def _check_finite(
    name: str, data: Sequence[Datum], examples: tuple[Example, ...], loss: Loss, indices: Sequence[int]
) -> None:
    """Raises OperationError if a given input is not finite.

    Log-probabilities of the sampler can be anything at positions that no loss reads: prompts often have none.
    """
    arrays = [
        example.inputs[name] if name in datum.loss_fn_inputs else np.zeros(example.targets.shape)
        for datum, example in zip(data, examples, strict=True)
    ]
    values = _joined(arrays)
    if np.isfinite(values).all():
        return
    if name == "logprobs":
        counts = [example.inputs[loss.counted_by] for example in examples]
        masks = [each.inputs.get("sequence_ratio_mask", own) for each, own in zip(examples, counts, strict=True)]
        values = np.where((_joined(counts) != 0) | (_joined(masks) != 0), values, 0.0)
        if np.isfinite(values).all():
            return
    at = int(np.argmin(np.isfinite(values)))
    datum, position = _find(at, arrays)
    raise OperationError(f"datum {indices[datum]}: {name} is {values[at]} at position {position}: it must be finite")


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0)


def denominator_of(loss: Loss, counts: np.ndarray) -> float:
    """Returns what "mean" divides gradients by: the sum of weights, or the number of positions with an advantage; 0 if
    the loss returns it itself."""
    if loss.head == "losses":
        return 0.0
    return float(counts.sum(dtype=np.float64)) if loss.counted_by == "weights" else float(np.count_nonzero(counts))


def _find(at: int, arrays: list[np.ndarray]) -> tuple[int, int]:
    """Returns (datum, position) of element `at` of the concatenated arrays."""
    for datum, array in enumerate(arrays):
        if at < array.size:
            return datum, at // (array.size // len(array))
        at -= array.size
    raise AssertionError("beyond the last array")


def _example(datum: Datum, targets: np.ndarray, loss: Loss, config: Mapping[str, float]) -> Example:
    given = datum.loss_fn_inputs
    # A number beyond float32 becomes infinite, which is then refused with its position.
    with np.errstate(over="ignore"):
        inputs = {name: given[name].astype(np.float32) for name in given if name != TARGETS}
    for name, fill in loss.optional.items():
        if name not in inputs:
            inputs[name] = np.broadcast_to(np.float32(fill(inputs, config)), targets.shape)
    if loss.head == "losses" and TARGETS not in given:  # the target of the last token is unknown
        inputs["weights"] = np.append(inputs["weights"][:-1], np.float32(0))
    return Example(datum.tokens.astype(np.int64), targets.astype(np.int64), inputs)


def _targets(datum: Datum, loss: Loss) -> np.ndarray:
    """Returns the targets of a datum: the given ones; for drafts, otherwise the tokens shifted by one; for losses
    without targets, such as those of values, zeros."""
    if loss.head == "logprobs" or (loss.head == "losses" and TARGETS in datum.loss_fn_inputs):
        return datum.loss_fn_inputs[TARGETS]
    if loss.head == "losses":
        return np.append(datum.tokens[1:], datum.tokens[:1])
    return np.zeros(len(datum.tokens), np.int64)


def _inputs(required: Sequence[str], loss: Loss) -> str:
    """Returns the names of the inputs that a loss reads."""
    optional = _listed(loss.optional)
    if not required:
        return f"{optional}, all optional"
    return f"{_listed(required)} and optionally {optional}" if optional else _listed(required)


def _allowed(config: Mapping[str, Any], key: str) -> str:
    if not config:
        return "it takes none"
    is_epsilon = "clip_low_threshold" in config and ("clip" in key or "eps" in key)
    hint = "; they bound the ratio itself, so an epsilon of 0.2 is written 0.8 and 1.2" if is_epsilon else ""
    return f"allowed: {_listed(config)}{hint}"


_OF_GROUPS = "; it is importance_sampling, or ppo, with the advantages of groups (docs/guides/rl.md)"
_SYNONYMS = {
    "grpo": _OF_GROUPS,
    "reinforce": _OF_GROUPS,
    "sft": "; it is cross_entropy",
    "nll": "; it is cross_entropy",
}
"""Names that other libraries have for losses, with the name here."""


def _listed(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(names)
