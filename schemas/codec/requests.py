"""Decodes forward_backward requests from protobuf and JSON, and encodes them to protobuf."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..bounds import MAX_JSON_BYTES
from ..errors import RequestError
from ..schedules import SCHEDULE_NAME
from ..training import (
    CLIPPED_LOSSES,
    DATUM_FIELDS,
    MAX_INTEGER,
    Datum,
    EvaluationSchedule,
    ForwardBackwardRequest,
    ProvenanceSpan,
)
from . import trainhouse_wire_pb2 as wire
from .formats import (
    JSON,
    MAX_DENSE_BYTES,
    PROTOBUF,
    Invalid,
    Rules,
    at_place,
    format_of,
    parse_json,
    parse_protobuf,
    refused_with_400,
    show_value,
)
from .protobuf_fields import check_num_messages
from .tensors import (
    TARGETS,
    array_from_bytes,
    array_to_bytes,
    as_loss_input,
    dense_from_json,
    numeric_array,
    read_tensor,
    write_tensor,
)
from .uniform_data import decode_uniform_data
from .values import (
    JsonObject,
    json_boolean,
    json_integer,
    json_list,
    json_number,
    json_object,
    json_text,
)

_PASS = ("data", "loss_fn", "loss_fn_config")
_OPTIONS = ("model_id", "seq_id", "forward_only", "loss_weight", "capture_for", "evaluation", "type")
_NESTED = ("forward_backward_input", "forward_input")

_MAX_MESSAGES = 1_000_000
_MAX_UNCOUNTED_BYTES = 2 * _MAX_MESSAGES
"""A body below this size cannot exceed _MAX_MESSAGES, since a message takes at least two bytes."""

_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"

_MANY = 4
"""Decoding by columns pays from this many data on."""


def decode_forward_backward(
    body: bytes,
    content_type: str,
    max_dense_bytes: int = MAX_DENSE_BYTES,
    forward_only: bool = False,
    evaluates: bool = False,
    ignore_unknown: bool = False,
    was_accepted: bool = False,
) -> ForwardBackwardRequest:
    """Decodes a forward_backward body: the SDK's protobuf, the JSON of SDK 0.25, or flat JSON with plain lists.

    Loss inputs are converted to the dtypes that the loss functions take: `target_tokens` int64, all others float32, CSR
    made dense.

    Args:
        forward_only: overrides the body if True.
        evaluates: whether it must have an `evaluation`, or must not.
        ignore_unknown: drops fields that this version does not know instead of refusing them.
        was_accepted: refuses nothing that only this version refuses.
    Raises:
        RequestError: 400 with the place and the reason, 413 for too much JSON, 415 for another content type;
            UnknownField for an unknown field.
    """
    body_format = format_of(content_type)
    if body_format == "json" and len(body) > MAX_JSON_BYTES:
        raise RequestError(f"the body has {len(body)} bytes of JSON; the limit is {MAX_JSON_BYTES}: send protobuf", 413)
    rules = Rules(max_dense_bytes, ignore_unknown, was_accepted)
    with refused_with_400():
        if body_format == "protobuf":
            request = _request_from_protobuf(body, rules)
        elif body_format == "json":
            kind = "create_evaluation" if evaluates else "forward" if forward_only else "forward_backward"
            request = _request_from_json(body, rules, kind)
        else:
            raise RequestError(
                f"content type {show_value(content_type)} is not supported: send {PROTOBUF} or {JSON}", 415
            )
        if evaluates and request.evaluation is None:
            raise Invalid("evaluation is missing: send its name and every how many steps it runs")
        if not evaluates and request.evaluation is not None:
            raise Invalid("evaluation is only for create_evaluation: leave it out")
        if request.loss_fn in CLIPPED_LOSSES and not was_accepted:
            check_clip_bounds(request)
        return replace(request, forward_only=forward_only or request.forward_only)


def encode_forward_backward_request(request: ForwardBackwardRequest) -> bytes:
    """Encodes to protobuf (see ForwardBackwardRequest). Raises ValueError on an unknown dtype."""
    message = wire.ForwardBackwardRequest(
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss_fn, forward_only=request.forward_only
    )
    if request.capture_for is not None:
        message.capture_for = request.capture_for
    if request.evaluation is not None:
        message.evaluation.name, message.evaluation.every = request.evaluation.name, request.evaluation.every
    if request.loss_weight != 1.0:
        message.loss_weight = request.loss_weight
    for key, value in request.loss_fn_config.items():
        entry = message.loss_fn_config_v2.add(key=key)
        if isinstance(value, str):
            entry.value.text = value
        else:
            entry.value.number = value
    for datum in request.data:
        _datum_to_protobuf(datum, message.data.add())
    return message.SerializeToString()


def _request_from_protobuf(body: bytes, rules: Rules) -> ForwardBackwardRequest:
    if len(body) > _MAX_UNCOUNTED_BYTES:
        check_num_messages(body, _MAX_MESSAGES)
    message = wire.ForwardBackwardRequest()
    parse_protobuf(message, body)
    rules.check_fields(message)
    data = decode_uniform_data(message.data, rules) if len(message.data) >= _MANY else None
    if data is None:
        data = tuple(_datum_from_protobuf(index, datum, rules) for index, datum in enumerate(message.data))
    config, evaluation = _loss_config_from_protobuf(message, rules), None
    if message.HasField("evaluation"):
        rules.check_fields(message.evaluation)
        evaluation = _evaluation(message.evaluation.name, message.evaluation.every)
    return _checked(
        ForwardBackwardRequest(
            model_id=message.model_id,
            seq_id=message.seq_id,
            data=data,
            loss_fn=message.loss_fn,
            loss_fn_config=config,
            forward_only=message.forward_only,
            loss_weight=message.loss_weight if message.HasField("loss_weight") else 1.0,
            capture_for=message.capture_for or None,
            evaluation=evaluation,
        )
    )


def _evaluation(name: str, every: int) -> EvaluationSchedule:
    if not re.fullmatch(SCHEDULE_NAME, name):
        raise Invalid(f"evaluation.name is {show_value(name)}: use 1 to 64 of A-Z a-z 0-9 . _ -")
    if not 1 <= every <= MAX_INTEGER:
        raise Invalid(f"evaluation.every is {show_value(every)}: it must be at least 1 step")
    return EvaluationSchedule(name, every)


def _loss_config_from_protobuf(message: wire.ForwardBackwardRequest, rules: Rules) -> Mapping[str, float | str]:
    """SDKs write the numbers of loss_fn_config_v2 into loss_fn_config as well, for servers that read only that."""
    rules.check_fields(*message.loss_fn_config, *message.loss_fn_config_v2)
    numbers = {entry.key: entry.value for entry in message.loss_fn_config}
    if not message.loss_fn_config_v2:
        return numbers
    config: dict[str, float | str] = {}
    for entry in message.loss_fn_config_v2:
        rules.check_fields(entry.value)
        kind = entry.value.WhichOneof("value")
        if kind is None and not rules.was_accepted:
            raise Invalid(f"loss_fn_config_v2[{show_value(entry.key)}] has neither number nor text: send one of them")
        config[entry.key] = entry.value.text if kind == "text" else entry.value.number
    if not rules.was_accepted:
        for key, number in numbers.items():
            if config.get(key) != number and not math.isnan(number):
                raise Invalid(
                    f"loss_fn_config[{show_value(key)}] is {number:g}, but loss_fn_config_v2 has "
                    f"{show_value(config.get(key, 'no such option'))}: send the same in both, or only one of them"
                )
    return config


def _datum_from_protobuf(index: int, message: wire.Datum, rules: Rules) -> Datum:
    try:
        rules.check_fields(message)
        tokens, inputs = _tokens_from_protobuf(message.model_input, rules), {}
        for entry in message.loss_fn_inputs:
            try:
                rules.check_fields(entry)
                inputs[entry.key] = as_loss_input(entry.key, read_tensor(entry.value, rules))
            except Invalid as error:
                raise error.at(f"loss_fn_inputs[{show_value(entry.key)}]") from None
        return Datum(
            tokens=tokens,
            loss_fn_inputs=inputs,
            model_input_spans=tuple(_span_from_protobuf(span, rules) for span in message.model_input_spans),
            loss_fn_input_spans=tuple(_span_from_protobuf(span, rules) for span in message.loss_fn_input_spans),
            feature_ref=message.feature_ref or None,
        )
    except Invalid as error:
        raise error.at(f"data[{index}]") from None


def _tokens_from_protobuf(chunks: Sequence[wire.Chunk], rules: Rules) -> np.ndarray:
    tokens = bytearray()
    for chunk in chunks:
        rules.check_fields(chunk)
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Invalid(_refusal_of_chunk(kind))
        rules.check_fields(text := chunk.encoded_text)
        if len(text.tokens) % 4:
            raise Invalid(f"{len(text.tokens)} bytes are not a whole number of int32 values")
        tokens += text.tokens
    if not tokens:
        raise Invalid("model_input has no tokens")
    return array_from_bytes(tokens, np.int32)


def _span_from_protobuf(message: wire.ProvenanceSpan, rules: Rules) -> ProvenanceSpan:
    rules.check_fields(message)
    match message.WhichOneof("span"):
        case "prompt_tokens":
            kind, span = "prompt", message.prompt_tokens
        case "sampled_tokens":
            kind, span = "sampled", message.sampled_tokens
        case _:
            raise Invalid("a provenance span has neither prompt_tokens nor sampled_tokens")
    rules.check_fields(span)
    return _checked_span(ProvenanceSpan(kind, span.sequence_id, span.offset, span.length))


def _datum_to_protobuf(datum: Datum, message: wire.Datum) -> None:
    message.model_input.add().encoded_text.tokens = array_to_bytes(datum.tokens, np.int32)
    for name, array in datum.loss_fn_inputs.items():
        write_tensor(array, message.loss_fn_inputs.add(key=name).value)
    if datum.feature_ref is not None:
        message.feature_ref = datum.feature_ref
    for span in datum.model_input_spans:
        _write_span(span, message.model_input_spans.add())
    for span in datum.loss_fn_input_spans:
        _write_span(span, message.loss_fn_input_spans.add())


def _write_span(span: ProvenanceSpan, message: wire.ProvenanceSpan) -> None:
    arm = message.prompt_tokens if span.kind == "prompt" else message.sampled_tokens
    arm.sequence_id, arm.offset, arm.length = span.sequence_id, span.offset, span.length


def _request_from_json(body: bytes, rules: Rules, kind: str) -> ForwardBackwardRequest:
    request = json_object(parse_json(body), "the body")
    forward_only = request.get("forward_only", "forward_input" in request)
    nested = next((name for name in _NESTED if request.get(name) is not None), None)
    content = request if nested is None else json_object(request[nested], nested)
    data = json_list(content.get("data", []), "data")
    decoded = _checked(
        ForwardBackwardRequest(
            model_id=json_text(request.get("model_id", ""), "model_id"),
            seq_id=json_integer(request.get("seq_id", 0), "seq_id"),
            data=tuple(_datum_from_json(index, datum, rules) for index, datum in enumerate(data)),
            loss_fn=json_text(content.get("loss_fn", ""), "loss_fn"),
            loss_fn_config=_loss_config_from_json(content.get("loss_fn_config")),
            forward_only=json_boolean(forward_only, "forward_only"),
            loss_weight=json_number(request.get("loss_weight", 1.0), "loss_weight"),
            capture_for=_optional_text(request.get("capture_for"), "capture_for"),
            evaluation=_evaluation_from_json(request.get("evaluation"), rules),
        )
    )
    if nested is None:
        rules.check_names(request, "the request", (*_PASS, *_OPTIONS, *_NESTED))
    else:
        rules.check_names(content, nested, _PASS)
        rules.check_names(request, "the request", (*_OPTIONS, nested), changes_results=False)
    if request.get("type", kind) != kind and not rules.was_accepted:
        raise Invalid(f"type is {show_value(request['type'])}: send {kind}, or leave it out")
    return decoded


def _evaluation_from_json(value: object, rules: Rules) -> EvaluationSchedule | None:
    if value is None:
        return None
    evaluation = json_object(value, "evaluation")
    rules.check_names(evaluation, "evaluation", ("name", "every"))
    name = json_text(evaluation.get("name", ""), "evaluation.name")
    return _evaluation(name, json_integer(evaluation.get("every", 0), "evaluation.every"))


def _optional_text(value: object, place: str) -> str | None:
    return None if value is None else json_text(value, place) or None


def _datum_from_json(index: int, value: object, rules: Rules) -> Datum:
    with at_place(f"data[{index}]"):
        datum = json_object(value, "a datum")
        rules.check_names(datum, "a datum", DATUM_FIELDS)
        inputs = json_object(datum.get("loss_fn_inputs", {}), "loss_fn_inputs")
        return Datum(
            tokens=_tokens_from_json(datum.get("model_input"), rules),
            loss_fn_inputs={name: _input_from_json(name, tensor, rules) for name, tensor in inputs.items()},
            model_input_spans=_spans_from_json(datum.get("model_input_spans"), "model_input_spans", rules),
            loss_fn_input_spans=_spans_from_json(datum.get("loss_fn_input_spans"), "loss_fn_input_spans", rules),
            feature_ref=_optional_text(datum.get("feature_ref"), "feature_ref"),
        )


def _tokens_from_json(value: object, rules: Rules) -> np.ndarray:
    """Decodes `model_input`: {"chunks": [...]}, or the token ids as a plain list."""
    if isinstance(value, list):
        tokens = value
    else:
        model_input = json_object(value, "model_input")
        rules.check_names(model_input, "model_input", ("chunks",))
        tokens: list[object] = []
        for value_of_chunk in json_list(model_input.get("chunks"), "model_input.chunks"):
            chunk = json_object(value_of_chunk, "a chunk")
            if (kind := chunk.get("type", "encoded_text")) != "encoded_text":
                raise Invalid(_refusal_of_chunk(kind))
            rules.check_names(chunk, "a chunk", ("type", "tokens"))
            tokens += json_list(chunk.get("tokens"), "tokens")
    if not tokens:
        raise Invalid("model_input has no tokens")
    with at_place("tokens"):
        array = numeric_array(tokens, integer=True)
        if array.ndim != 1:
            raise Invalid("token ids must be a flat list")
        if not -(2**31) <= array.min() <= array.max() < 2**31:
            raise Invalid("a token id does not fit 32 bits")
        return array.astype(np.int32)


def _input_from_json(name: str, value: object, rules: Rules) -> np.ndarray:
    json_text(name, "an input name")
    with at_place(f"loss_fn_inputs[{show_value(name)}]"):
        if isinstance(value, list):
            return as_loss_input(name, numeric_array(value, integer=name == TARGETS))
        return as_loss_input(name, dense_from_json(value, 0, rules, integer=name == TARGETS))


def _spans_from_json(value: object, place: str, rules: Rules) -> tuple[ProvenanceSpan, ...]:
    return tuple(_span_from_json(json_object(span, place), rules) for span in json_list(value or [], place))


def _span_from_json(span: JsonObject, rules: Rules) -> ProvenanceSpan:
    rules.check_names(span, "a span", ("kind", "sequence_id", "offset", "length"))
    kind = span.get("kind")
    if kind not in ("prompt", "sampled"):
        raise Invalid(f"provenance span kind {show_value(kind)} must be prompt or sampled")
    return _checked_span(
        ProvenanceSpan(
            kind="prompt" if kind == "prompt" else "sampled",
            sequence_id=json_text(span.get("sequence_id", ""), "sequence_id"),
            offset=json_integer(span.get("offset", 0), "offset"),
            length=json_integer(span.get("length"), "length"),
        )
    )


def _loss_config_from_json(value: object) -> Mapping[str, float | str]:
    config = json_object({} if value is None else value, "loss_fn_config")
    return {
        json_text(key, "a loss_fn_config key"): json_text(entry, key)
        if isinstance(entry, str)
        else json_number(entry, f"loss_fn_config[{show_value(key)}]")
        for key, entry in config.items()
    }


def _checked(request: ForwardBackwardRequest) -> ForwardBackwardRequest:
    if not request.model_id:
        raise Invalid("model_id is missing: send the id that create_model returned")
    if not request.data:
        raise Invalid("data is empty: send at least one datum")
    for name in ("model_id", "loss_fn", "capture_for"):
        if "\0" in (getattr(request, name) or ""):
            raise Invalid(f"{name} is {show_value(getattr(request, name))}: it must not contain NUL")
    if not math.isfinite(request.loss_weight):
        raise Invalid(f"loss_weight is {request.loss_weight}: it must be finite")
    return request


def _checked_span(span: ProvenanceSpan) -> ProvenanceSpan:
    if not span.sequence_id or span.offset < 0 or span.length < 0:
        raise Invalid(f"provenance span {show_value(span)} needs a sequence_id, offset >= 0 and length >= 0")
    return span


def _refusal_of_chunk(kind: object) -> str:
    return f"a model_input chunk of type {show_value(kind)} is not supported: send encoded_text chunks only"


def check_clip_bounds(request: ForwardBackwardRequest) -> None:
    """Raises Invalid if bounds in the options, or of a token with an advantage, leave out 1, where the ratio
    begins: they clip everything."""
    options = {name: value for name, value in request.loss_fn_config.items() if not isinstance(value, str)}
    low, high = options.get(_LOW), options.get(_HIGH)
    if (low is not None and low > 1) or (high is not None and high < 1):
        raise _wrong_bounds(request.loss_fn, low, high, "")
    for index, datum in enumerate(request.data):
        inputs = datum.loss_fn_inputs
        if _LOW not in inputs and _HIGH not in inputs:
            continue
        shape = datum.tokens.shape
        low, high, advantages = (inputs.get(name, np.ones(shape)) for name in (_LOW, _HIGH, "advantages"))
        if not all(each.shape == shape and each.dtype.kind in "fiub" for each in (low, high, advantages)):
            continue  # the workers refuse it by name
        wrong = np.flatnonzero((advantages != 0) & ((low > 1) | (high < 1)))
        if wrong.size:
            at = int(wrong[0])
            of_low, of_high = (float(inputs[name][at]) if name in inputs else None for name in (_LOW, _HIGH))
            raise _wrong_bounds(request.loss_fn, of_low, of_high, f"datum {index}, position {at}: ")


def _wrong_bounds(loss_fn: str, low: float | None, high: float | None, where: str) -> Invalid:
    given = " and ".join(f"{name} {value:g}" for name, value in ((_LOW, low), (_HIGH, high)) if value is not None)
    epsilons = 0.2 if low is None or abs(low) >= 1 else abs(low), 0.2 if high is None or abs(high) >= 1 else abs(high)
    return Invalid(
        f"{where}{loss_fn} has {given}: these are bounds on the ratio itself, and must contain 1. An epsilon of"
        f" {' below and '.join(f'{each:g}' for each in dict.fromkeys(epsilons))} is written {_LOW} {1 - epsilons[0]:g}"
        f" and {_HIGH} {1 + epsilons[1]:g}"
    )
