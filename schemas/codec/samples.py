"""Encodes and decodes sample responses."""

import math
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from ..sampling import EMPTY_LOGPROB, GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from . import trainhouse_wire_pb2 as wire
from .formats import Rules, parse_protobuf
from .tensors import (
    CsrLayout,
    array_from_bytes,
    array_to_bytes,
    read_tensor,
    reshape_checked,
    tensor_rows,
    write_target_logprobs,
    write_tensor,
)
from .values import JsonObject, JsonRows, json_object, json_pieces, rows_of, without_rows


def encode_sample_response(response: SampleResponse, target_layout: CsrLayout | None = None) -> bytes:
    """Encodes to protobuf. target_layout: that of the request's target_prompt_logprobs, if it was CSR."""
    # Serialized fields can be joined to the same message, and none of them takes long to serialize.
    return b"".join(message.SerializeToString() for message in _messages(response, target_layout))


def _messages(response: SampleResponse, target_layout: CsrLayout | None) -> Iterator[wire.SampleResponse]:
    """Yields one message per field of the response."""
    for sequence in response.sequences:
        written = (message := wire.SampleResponse()).sequences.add()
        written.stop_reason = wire.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire.STOP_REASON_LENGTH
        written.tokens = array_to_bytes(sequence.tokens, np.int32)
        written.logprobs = array_to_bytes(sequence.logprobs, np.float32)
        if sequence.topk_logprobs is not None:
            _write_topk(sequence.topk_logprobs, written.topk_sampled_logprobs)
        yield message
    if response.prompt_logprobs is not None:
        yield wire.SampleResponse(prompt_logprobs=array_to_bytes(response.prompt_logprobs, np.float32))
    if response.topk_prompt_logprobs is not None:
        _write_topk(response.topk_prompt_logprobs, (message := wire.SampleResponse()).topk_prompt_logprobs)
        yield message
    yield wire.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    if response.target_prompt_logprobs is not None:
        tensor = (message := wire.SampleResponse()).target_prompt_logprobs
        write_target_logprobs(response.target_prompt_logprobs, target_layout, tensor)
        yield message
    if response.prompt_alt_tokens is not None and response.prompt_alt_logprobs is not None:
        write_tensor(response.prompt_alt_tokens, (message := wire.SampleResponse()).prompt_alt_tokens.tokens)
        yield message
        write_tensor(response.prompt_alt_logprobs, (message := wire.SampleResponse()).prompt_alt_tokens.logprobs)
        yield message
    if (guesses := response.guesses) is not None:
        counts = (message := wire.SampleResponse()).guesses
        counts.passes, counts.drafted, counts.accepted = guesses.passes, guesses.drafted, guesses.accepted
        counts.by_accepted.extend(guesses.by_accepted)
        yield message


def encode_sample_response_json(response: SampleResponse) -> JsonObject:
    """Returns the response as a JSON object. What was not requested is absent, NaN is null, tensors are dense
    TensorData. Top-k rows are lists of [token_id, logprob], null where nothing was scored."""
    return json_object(without_rows(_rows(response)), "an answer")


def sample_response_json_pieces(response: SampleResponse) -> Iterator[bytes]:
    """Yields the JSON text of `encode_sample_response_json` in pieces."""
    return json_pieces(_rows(response))


def _rows(response: SampleResponse) -> JsonObject:
    answer: JsonObject = {"sequences": [_sequence_to_json(sequence) for sequence in response.sequences]}
    if response.prompt_logprobs is not None:
        answer["prompt_logprobs"] = rows_of(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        answer["topk_prompt_logprobs"] = _topk_rows(response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        answer["target_prompt_logprobs"] = tensor_rows(response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None and response.prompt_alt_logprobs is not None:
        answer["prompt_alt_tokens"] = {
            "tokens": tensor_rows(response.prompt_alt_tokens),
            "logprobs": tensor_rows(response.prompt_alt_logprobs),
        }
    if response.guesses is not None:
        answer["guesses"] = {**asdict(response.guesses), "acceptance_length": response.guesses.acceptance_length}
    return {**answer, "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens, "type": "sample"}


def decode_sample_response(body: bytes) -> SampleResponse:
    """Decodes protobuf. Raises ValueError."""
    message = wire.SampleResponse()
    parse_protobuf(message, body)
    rules = Rules(ignore_unknown=True)
    alternatives = message.prompt_alt_tokens if message.HasField("prompt_alt_tokens") else None
    counts = message.guesses
    guesses = GuessCounts(counts.passes, counts.drafted, counts.accepted, tuple(counts.by_accepted))
    return SampleResponse(
        sequences=tuple(_read_sequence(sequence) for sequence in message.sequences),
        prompt_logprobs=array_from_bytes(message.prompt_logprobs, np.float32) if message.prompt_logprobs else None,
        topk_prompt_logprobs=_read_topk(message.topk_prompt_logprobs) if message.topk_prompt_logprobs.k else None,
        target_prompt_logprobs=read_tensor(message.target_prompt_logprobs, rules)
        if message.HasField("target_prompt_logprobs")
        else None,
        prompt_alt_tokens=read_tensor(alternatives.tokens, rules).astype(np.int32) if alternatives else None,
        prompt_alt_logprobs=read_tensor(alternatives.logprobs, rules) if alternatives else None,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        guesses=guesses if message.HasField("guesses") else None,
    )


def dense_target_bytes(body: bytes) -> int:
    """Returns the size of the result's target_prompt_logprobs once dense, which its few bytes, if it is sparse, do not
    bound. Raises ValueError."""
    message = wire.SampleResponse()
    parse_protobuf(message, body)
    return 4 * math.prod(message.target_prompt_logprobs.shape) if message.HasField("target_prompt_logprobs") else 0


def _write_topk(topk: TopkLogprobs, message: wire.TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = array_to_bytes(topk.token_ids, np.int32)
    message.logprobs = array_to_bytes(topk.logprobs, np.float32)


def _read_sequence(message: wire.SampledSequence) -> SampledSequence:
    return SampledSequence(
        stop_reason="length" if message.stop_reason == wire.STOP_REASON_LENGTH else "stop",
        tokens=array_from_bytes(message.tokens, np.int32),
        logprobs=array_from_bytes(message.logprobs, np.float32),
        topk_logprobs=_read_topk(message.topk_sampled_logprobs) if message.topk_sampled_logprobs.k else None,
    )


def _read_topk(message: wire.TopkLogprobs) -> TopkLogprobs:
    shape = (message.length, message.k)
    return TopkLogprobs(
        token_ids=reshape_checked(array_from_bytes(message.token_ids, np.int32), shape),
        logprobs=reshape_checked(array_from_bytes(message.logprobs, np.float32), shape),
    )


def _sequence_to_json(sequence: SampledSequence) -> JsonObject:
    answer: JsonObject = {
        "stop_reason": sequence.stop_reason,
        "tokens": rows_of(sequence.tokens),
        "logprobs": rows_of(sequence.logprobs),
    }
    if sequence.topk_logprobs is not None:
        answer["topk_logprobs"] = _topk_rows(sequence.topk_logprobs)
    return answer


def _topk_rows(topk: TopkLogprobs) -> JsonRows:
    num, k = topk.token_ids.shape

    def entries(start: int, stop: int) -> list[list[list[float]] | None]:
        rows = zip(topk.token_ids[start:stop].tolist(), topk.logprobs[start:stop].tolist(), strict=True)
        cells = (
            [[token, logprob] for token, logprob in zip(*row, strict=True) if logprob != EMPTY_LOGPROB] for row in rows
        )
        return [row or None for row in cells]

    return JsonRows(num, entries, 2 * k)
