"""The base classes of all messages, and messages about training: data, forward_backward, optim_step, results."""

import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from .bounds import Id, one_of
from .errors import ReadableErrors, UnknownField


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """Consecutive positions of a datum that repeat tokens of an earlier sampling request.

    kind: "prompt" for tokens of the prompt, "sampled" for sampled tokens.
    """

    kind: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """Holds one training sequence. Position i of the targets is predicted from `tokens[: i + 1]` (the client shifts).

    tokens: int32 [T].
    loss_fn_inputs: name -> dense array; `target_tokens` int64 [T] or [T, K], the others float32 in the shape that the
        loss requires (see workers/losses).
    *_spans: tilings of the positions of `tokens` and of `target_tokens`; empty if the client gave none.
    feature_ref: the captured features of a draft's target at these tokens (ours; see CaptureRequest).
    """

    tokens: np.ndarray
    loss_fn_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    model_input_spans: tuple[ProvenanceSpan, ...] = ()
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] = ()
    feature_ref: str | None = None


TargetRepr = Literal["hidden_state", "logits", "pruned_logits"]
"""The form in which a draft reads its target's distribution and in which captured features store it. "hidden_state":
final hidden states, from which the output head computes all logits again. "logits": all logits. "pruned_logits": logits
of some tokens, and the probability of the others."""


@dataclass(frozen=True, slots=True)
class DraftFeatures:
    """Says which features a draft reads.

    target_repr, target_top_k: as in DraftConfig. vocabulary: the draft's, int32 ids, if the logits are pruned to it.
    """

    algorithm: str
    layers: tuple[int, ...]
    target_repr: TargetRepr | None = None
    target_top_k: int | None = None
    vocabulary: bytes = b""


@dataclass(frozen=True, slots=True)
class FeatureLocation:
    """Locates captured features.

    captures: true if the request only captures features and does nothing else.
    draft: what a draft reads, if a policy's pass captures features for it in addition to training.
    """

    directory: str
    captures: bool = False
    draft: DraftFeatures | None = None


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """An evaluation after every `every`-th optimizer step."""

    name: str
    every: int


SEED = "seed"
"""The key of `loss_fn_config` for the seed of a loss that draws random numbers."""

# What the server, which has no torch, must know of losses before it hands them to workers.

CLIPPED_LOSSES = frozenset({"ppo", "cispo", "gspo"})
"""Losses with `clip_low_threshold` and `clip_high_threshold`, which are checked when a request is decoded."""

RANDOM_LOSSES = frozenset({"dflash"})
"""Losses whose seed the server draws if a request has none, so that a replay repeats it."""

RECORDED_LOSSES = frozenset({"stable_reinforce"})
"""Losses that read what earlier samples recorded."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """Computes a loss and its gradient. Losses are sums over tokens and data; gradients accumulate until `optim_step`.

    loss_weight: a factor of the loss (ours; not sent by the SDK).
    forward_only: the same outputs without a gradient.
    capture_for: id of a draft for which this policy's pass captures features (ours; see docs/drafts.md).
    evaluation: creates this evaluation with the data, instead of a pass (ours).
    features: the place of features that data refer to. The server sets it; it is not part of the protocol.
    """

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    loss_weight: float = 1.0
    capture_for: str | None = None
    evaluation: EvaluationSchedule | None = None
    features: FeatureLocation | None = None

    @property
    def total_weight(self) -> float:
        """Returns the sum of the weights of the data, or their number of tokens if they have none."""
        return sum(
            float(each.loss_fn_inputs["weights"].sum()) if "weights" in each.loss_fn_inputs else float(len(each.tokens))
            for each in self.data
        )

    @property
    def lacks_seed(self) -> bool:
        return self.loss_fn in RANDOM_LOSSES and SEED not in self.loss_fn_config

    @property
    def reads_recordings(self) -> bool:
        return self.loss_fn in RECORDED_LOSSES

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles many data as columns."""
        packed = _PackedData.of(self.data) if len(self.data) >= _MANY else None
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"data": packed or self.data}
        return ForwardBackwardRequest, tuple(values.values())


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The result of a forward_backward.

    loss_fn_outputs: for each datum name -> array: `logprobs`, float32 in the shape of `target_tokens`, or for critics
        `values`, float32 [T].
    metrics: every key is `name:reduction` with exactly one colon; `loss:sum` is always present.
    feature_refs: one per datum if features were captured for a draft (ours); None if they could not be stored.
    """

    loss_fn_outputs: tuple[Mapping[str, np.ndarray], ...]
    metrics: Mapping[str, float]
    loss_fn_output_type: str = "scalar"
    feature_refs: tuple[str | None, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles many outputs as columns."""
        outputs = self.loss_fn_outputs
        columns = columns_of(outputs) if len(outputs) >= _MANY else None
        packed = outputs if columns is None else _PackedRecords(columns, len(outputs))
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"loss_fn_outputs": packed}
        return ForwardBackwardOutput, tuple(values.values())


# Pickling costs an object or two per array in each direction. A column is pickled as one array, and the small arrays
# become views of it on the other side.
_MANY = 8
"""Packing into columns for a pickle pays from this many data on."""

_KIND = attrgetter("dtype", "ndim")


class Column(NamedTuple):
    """Concatenated arrays of the same dtype and number of dimensions."""

    values: np.ndarray
    """All of their elements, flat."""
    shapes: np.ndarray
    """int64 [arrays, dimensions]."""

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays as views of `values`."""
        stops = self.shapes.prod(axis=1).cumsum().tolist()
        flat = [self.values[start:stop] for start, stop in pairwise([0, *stops])]
        if self.shapes.shape[1] == 1:
            return flat
        return [array.reshape(shape) for array, shape in zip(flat, self.shapes.tolist(), strict=True)]


Columns = Mapping[str, Column]


def column_of(arrays: Sequence[np.ndarray]) -> Column | None:
    """Returns the arrays as a column, None if their dtypes or numbers of dimensions differ."""
    if len(set(map(_KIND, arrays))) > 1:
        return None
    if arrays[0].ndim == 1:
        return Column(np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))[:, None])
    shapes = np.array([array.shape for array in arrays], np.int64)
    return Column(np.concatenate([array.ravel() for array in arrays]), shapes)


def columns_of(records: Sequence[Mapping[str, np.ndarray]]) -> Columns | None:
    """Returns a column of all records' arrays for each name.

    Returns None if the records differ in their names, or if the arrays of a name do not fit into a column.
    """
    columns: dict[str, Column] = {}
    names = records[0].keys()
    if any(record.keys() != names for record in records):
        return None
    for name in names:
        column = column_of([record[name] for record in records])
        if column is None:
            return None
        columns[name] = column
    return columns


def records_of(columns: Columns, num_records: int) -> tuple[dict[str, np.ndarray], ...]:
    """Returns the records that `columns_of` packed."""
    if not columns:
        return tuple({} for _ in range(num_records))
    rows = zip(*(column.arrays() for column in columns.values()), strict=True)
    return tuple(dict(zip(columns, row, strict=True)) for row in rows)


class _PackedRecords(NamedTuple):
    """Unpickled as the records themselves."""

    columns: Columns
    num_records: int

    def __reduce__(self) -> tuple[object, ...]:
        return records_of, (*self,)


# The fields of a datum that are not arrays: the two tuples of spans, and the reference to features.
_Extras = tuple[tuple[ProvenanceSpan, ...], tuple[ProvenanceSpan, ...], str | None]


class _PackedData(NamedTuple):
    """Data as columns, unpickled as the data themselves."""

    tokens: Column
    inputs: Columns
    extras: tuple[_Extras, ...] | None
    """One per datum, None if no datum has any."""

    @staticmethod
    def of(data: tuple[Datum, ...]) -> "_PackedData | None":
        """Returns None if the data differ in names, dtypes or dimensions."""
        tokens = column_of([datum.tokens for datum in data])
        inputs = columns_of([datum.loss_fn_inputs for datum in data])
        if tokens is None or inputs is None:
            return None
        extras = tuple((datum.model_input_spans, datum.loss_fn_input_spans, datum.feature_ref) for datum in data)
        return _PackedData(tokens, inputs, extras if any(any(each) for each in extras) else None)

    def __reduce__(self) -> tuple[object, ...]:
        return _unpacked_data, (*self,)


def _unpacked_data(tokens: Column, inputs: Columns, extras: tuple[_Extras, ...] | None) -> tuple[Datum, ...]:
    rows = tokens.arrays()
    rest = zip(*extras, strict=True) if extras is not None else ()
    return tuple(map(Datum, rows, records_of(inputs, len(rows)), *rest))


IGNORE_UNKNOWN = {"unknown": "ignored"}
"""Context of a validation in which Strict takes unknown fields, too."""

DATUM_FIELDS = ("model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans", "feature_ref")
"""Fields of a datum in JSON."""

TENSOR_FIELDS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
"""Fields of a tensor in JSON."""

_MAX_NAME = 80
"""Characters of an unknown name that are compared and repeated in the error."""


class Wire(BaseModel):
    """Base of the JSON bodies. They are frozen, ignore unknown keys, and can have fields named model_*."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Request(Wire):
    """Base of requests and their parts. Unknown fields are kept for `check_unknown`."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Maps names that other libraries use to the field's name."""
    is_about_results: ClassVar[bool] = False
    """A datum, tensor, loss, optimizer or sampling message: a field that is not honored would change the result."""

    @property
    def unknown_names(self) -> Iterable[str]:
        return self.__pydantic_extra__ or ()

    @classmethod
    def describe_unknown(cls, name: str) -> str:
        """Says that there is no such field, and which one was probably meant."""
        parts = {field: kind for field, kinds in parts_of(cls).items() for kind in kinds}
        inside = next((field for field, kind in parts.items() if name in {*kind.model_fields, *kind.synonyms}), None)
        meant = cls.synonyms.get(name)
        if meant is None and inside is not None:
            meant = f"{inside}.{parts[inside].synonyms.get(name, name)}"
        return describe_unknown(cls.__name__, name, cls.model_fields, meant)


class Strict(Request, metaclass=ReadableErrors):
    """Refuses unknown fields when it is built, too: a misspelt one would leave its field at the default."""

    @model_validator(mode="before")
    @classmethod
    def _names_are_known(cls, given: object, info: ValidationInfo) -> object:
        for name in given if isinstance(given, dict) and info.context is not IGNORE_UNKNOWN else ():
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_name", "{words}", {"words": cls.describe_unknown(str(name))})
        return given


def describe_unknown(kind: str, name: str, known: Iterable[str], meant: str | None = None) -> str:
    """Returns the error for an unknown field. meant: the field to suggest instead of the one with the nearest name."""
    near = difflib.get_close_matches(name[:_MAX_NAME], known, n=1)
    meant = meant or (near[0] if near else None)
    shown = name if re.fullmatch(r"[\w.-]{1,80}", name) else repr(name[:_MAX_NAME])
    return f"{kind} has no {shown}: " + (f"did you mean {meant}?" if meant else f"it has {', '.join(known) or 'none'}")


def check_unknown(request: Request, ignore_unknown: bool) -> None:
    """Raises UnknownField if the request or a part of it has an unknown field, first for one that changes results.

    Drops those that `unknown_names` leaves out, or all if `ignore_unknown`.
    """
    refused, waiting = None, [request]
    while waiting and not (refused and refused[0].is_about_results):
        part = waiting.pop()
        name = None if ignore_unknown else next(iter(part.unknown_names), None)
        if name is not None:
            refused = part, name
        elif part.__pydantic_extra__:
            part.__pydantic_extra__.clear()
        for field_name in parts_of(type(part)):
            match getattr(part, field_name):
                case Request() as one:
                    waiting.append(one)
                case [Request(), *_] as several:
                    waiting += several
    if refused is not None:
        part, name = refused
        raise UnknownField(f"bad request: {part.describe_unknown(name)}", part.is_about_results)


@cache
def parts_of(kind: type[Request]) -> Mapping[str, tuple[type[Request], ...]]:
    """Returns the fields that hold requests' parts, or lists of them, with the kinds of these parts."""
    found = {name: tuple(_requests_in(field.annotation)) for name, field in kind.model_fields.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


def _requests_in(annotation: object) -> Iterator[type[Request]]:
    if isinstance(annotation, type) and issubclass(annotation, Request):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _requests_in(argument)


class AdamParams(Strict):
    """Parameters of one step of AdamW as torch defines it. grad_clip_norm: limit of the global norm, 0 for off."""

    is_about_results = True
    synonyms: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate",
        "betas": "beta1 and beta2",
        "epsilon": "eps",
        "wd": "weight_decay",
        **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "grad_clip"), "grad_clip_norm"),
    }

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


MAX_INTEGER = 2**63 - 1
Integer = Annotated[int, Field(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)]
"""An integer that fits into databases and tensors. Every integer of a request has these bounds or tighter ones."""
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Seed = Annotated[int, Field(ge=-MAX_INTEGER - 1, le=2**64 - 1)]
"""A seed that torch accepts."""

SeqId = Natural
"""The number of an operation in its run, from 1; with 0 (ours) the server assigns the next one."""


class OptimStepRequest(Request):
    """Takes an optimizer step with the accumulated gradients.

    gradient_scale (ours): a factor of the gradients: a number, or "mean" for one over the window's summed weights.
    """

    is_about_results = True

    model_id: Id
    seq_id: SeqId = 0
    adam_params: AdamParams | None = None
    optimizer_params: Annotated[dict[Id, float | Integer | Id], Field(max_length=64)] | None = None
    gradient_scale: Annotated[float | Literal["mean"] | None, one_of('a number or "mean"')] = None
    type: Literal["optim_step"] = "optim_step"


class OptimStepResponse(Wire):
    """warnings (ours): what the server was to do after the step, and could not."""

    metrics: dict[str, float] | None = None
    warnings: list[str] | None = None
    type: Literal["optim_step"] = "optim_step"
