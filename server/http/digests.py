"""Digests of decoded requests. They distinguish a retry from another request under the same number.

Encodings of the same content have the same digest: JSON or protobuf, compressed or not, dense or sparse tensors, fields
left out or sent with their defaults. Digests are stored, so what they are computed from must not change.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel

from ...schemas.codec import JsonObject, csr_layout_from_json, tensor_from_json
from ...schemas.drafts import BuildVocabMapRequest, CaptureRequest
from ...schemas.sampling import SampleRequest
from ...schemas.training import ForwardBackwardRequest, ProvenanceSpan

_DIGEST_CHARACTERS = 32
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_NO_CONTENT = {
    *("model_id", "seq_id", "sampling_session_id"),  # the number, and the run or sampler that it belongs to
    "sampling_session_seq_id",  # the SDK sends a save again with the next one
    "weights_access_token",  # a secret, which may have been renewed
}
_SAME_IF_EMPTY = ("adam_params", "sampling_params", "user_metadata", "optimizer_config")
"""Objects of a request that mean the same if they are left out."""

Content = TypeVar("Content")
Arrays = Iterable[bytes | memoryview | array]


class Fingerprint(NamedTuple):
    """Says which request a number was used for. kind: in the journal. digest: see decode_with_digest."""

    kind: str
    digest: str

    def words(self, known: "Fingerprint") -> str:
        """Returns what this request is, after the `known` one with its number was named."""
        if self.kind != known.kind:
            return f"was {_a(known.kind)}, this is {_a(self.kind)}"
        return f"was {_a(known.kind)}, this is another {self.kind} with different content"


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def decode_with_digest(decode: Callable[[bytes], Content], body: bytes) -> tuple[Content, str]:
    """Returns a decoded body and the digest of what it requests, without the number of the request."""
    content = decode(body)
    assert isinstance(content, BaseModel | ForwardBackwardRequest)
    digest = hashlib.sha256()
    for piece in _pieces_of_pass(content) if isinstance(content, ForwardBackwardRequest) else _pieces_of(content):
        digest.update(piece)
    return content, digest.hexdigest()[:_DIGEST_CHARACTERS]


def _pieces_of(request: BaseModel) -> Arrays:
    """Yields the bytes to hash: the request without its seq_id, and each array after its size."""
    of_fields = _arrays_of(request)
    yield _JSON.encode(
        {"type": getattr(request, "type", None), **content_of(request, without=of_fields.keys())}
    ).encode()
    yield from chain.from_iterable(of_fields.values())


def _pieces_of_pass(request: ForwardBackwardRequest) -> Arrays:
    """Like `_pieces_of`: all tokens, and of each input the datums that have it, its shapes and all its values."""
    schedule, data = request.evaluation, request.data
    yield _JSON.encode(
        (
            "forward" if request.forward_only else "forward_backward",
            request.loss_fn,
            dict(request.loss_fn_config),
            request.loss_weight,
            request.capture_for,
            None if schedule is None else (schedule.name, schedule.every),
            [
                (
                    index,
                    *map(_content_of_spans, (datum.model_input_spans, datum.loss_fn_input_spans)),
                    datum.feature_ref,
                )
                for index, datum in enumerate(data)
                if datum.model_input_spans or datum.loss_fn_input_spans or datum.feature_ref
            ],
        )
    ).encode()
    columns: dict[str, list[tuple[int, np.ndarray]]] = {}
    for index, datum in enumerate(data):
        for name, values in datum.loss_fn_inputs.items():
            columns.setdefault(name, []).append((index, values))
    yield json.dumps(sorted(columns)).encode()
    yield array("q", [len(data), *(len(datum.tokens) for datum in data)])
    yield np.concatenate([datum.tokens for datum in data]).data
    for _, column in sorted(columns.items()):
        places = (number for index, values in column for number in (index, values.ndim, *values.shape))
        yield array("q", [len(column), *places])
        yield np.concatenate([values.ravel() for _, values in column]).data


def content_of(request: BaseModel, without: Collection[str] = ()) -> dict[str, object]:
    """Returns the fields that are not defaults, so that fields added by later versions do not change it."""
    content = request.model_dump(exclude_defaults=True, exclude=_NO_CONTENT.union(without))
    params = content.get("sampling_params", {})
    if isinstance(stop := params.get("stop"), str):
        params["stop"] = [stop]
    if params.get("logit_bias") == {}:
        del params["logit_bias"]
    if "constraint" in params:
        # As text, since a sample has its properties in the order of the schema.
        params["constraint"] = json.dumps(params["constraint"])
    return {name: value for name, value in content.items() if value != {} or name not in _SAME_IF_EMPTY}


def _content_of_spans(spans: Sequence[ProvenanceSpan]) -> object:
    return [(span.kind, span.sequence_id, span.offset, span.length) for span in spans]


def _arrays_of(request: BaseModel) -> dict[str, Arrays]:
    """Returns the fields with many numbers. The arrays of a field begin with their sizes."""
    match request:
        case SampleRequest():
            targets = request.target_prompt_logprobs
            return {"prompt": _rows([request.prompt.to_ints()]), "target_prompt_logprobs": _arrays_of_targets(targets)}
        case CaptureRequest():
            return {"data": _rows([each.tokens for each in request.data])}
        case BuildVocabMapRequest():
            tokens, counts = request.tokens or (), request.counts or {}
            return {
                "tokens": _rows(tokens),
                "weights": _rows(request.weights or (), "d"),
                "counts": _rows([sorted(counts), [counts[token] for token in sorted(counts)]]),
            }
        case _:
            return {}


def _arrays_of_targets(tensor: JsonObject | None) -> Arrays:
    """Yields the listed cells of a sparse tensor with their layout, which its answer has as well."""
    if tensor is None:
        return
    layout = csr_layout_from_json(tensor)
    if layout is not None:
        yield from (array("q", layout.shape), layout.crow_indices.data, layout.col_indices.data)
        tensor = {name: tensor[name] for name in ("data", "dtype") if name in tensor}
    cells = tensor_from_json(tensor, name="target_prompt_logprobs")
    yield from (array("q", [cells.ndim, *cells.shape]), np.ascontiguousarray(cells).data)


def _rows(rows: Sequence[Sequence[float]], code: str = "q") -> Arrays:
    yield array("q", [len(rows), *map(len, rows)])
    for row in rows:
        yield array(code, row)
