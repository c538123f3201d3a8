"""Recordings: sampled tokens and their log-probabilities, which losses refer to by sequence id.

Samples requested with `record_stability_info` are kept for a day under their sequence ids; each use restarts the day.
`fill_in` turns the provenance spans of a `stable_reinforce` request into its `logprobs` and `sampled_mask` inputs.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ...schemas.training import Datum, ForwardBackwardRequest, ProvenanceSpan
from ..files.segment import LogRecord, read_segment
from ..files.segment_log import RecordPosition, SegmentLog

logger = logging.getLogger(__name__)

KEPT_SECONDS = 86400.0
_SEGMENT_BYTES = 16 << 20
_MAX_IN_MEMORY = 2000
# What clients put in target_tokens where nothing is trained, instead of a prompt's tokens.
_NO_TARGET = 0


@dataclass(frozen=True, eq=False)
class Recording:
    """The recorded sequences of one sampling request.

    prompt: int32 [T]. tokens, logprobs: per sequence, int32 [n] and float32 [n].
    """

    tenant_id: str
    prompt: np.ndarray
    tokens: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]


class Recordings:
    """Holds recordings by request id; a sequence id is the request id, a colon, and the sequence's index."""

    def __init__(self, directory: Path, sync: bool = False) -> None:
        """Creates the store of recordings in `directory`.

        Args:
            sync: whether recordings must survive a machine crash.
        """
        self._segments = SegmentLog(directory, _SEGMENT_BYTES, sync)
        self._places: dict[str, RecordPosition] = {}
        self._in_memory: OrderedDict[str, Recording] = OrderedDict()
        self._read_earlier = not self._segments.earlier
        self._reading = asyncio.Lock()

    async def keep(self, request_id: str, tenant_id: str, prompt: np.ndarray, response: SampleResponse) -> None:
        """Returns as soon as the recording survives a crash of this process. Raises OSError."""
        sequences = response.sequences
        recording = Recording(
            tenant_id,
            prompt.astype(np.int32),
            tuple(sequence.tokens.astype(np.int32) for sequence in sequences),
            tuple(sequence.logprobs.astype(np.float32) for sequence in sequences),
        )
        self._places[request_id] = await self._segments.append(_header(request_id, recording), _body(recording))
        self._remember(request_id, recording)

    async def fill_in(self, tenant_id: str, request: ForwardBackwardRequest) -> ForwardBackwardRequest:
        """Returns the request with the `logprobs` and `sampled_mask` that its spans refer to, and restarts their day.

        Raises:
            OperationError: category "user", a span does not match its recording.
        """
        data = []
        for index, datum in enumerate(request.data):
            try:
                data.append(await self._fill_in_datum(tenant_id, datum))
            except OperationError as error:
                raise OperationError(f"data[{index}]: {error}", error.category) from None
        await self._renew([before for before, after in zip(request.data, data, strict=True) if after is not before])
        return replace(request, data=tuple(data))

    async def _renew(self, data: Sequence[Datum]) -> None:
        """Renews the whole segments of the recordings that the data use."""
        spans = (span for datum in data for span in datum.loss_fn_input_spans)
        places = (self._places.get(span.sequence_id.rpartition(":")[0]) for span in spans)
        if segments := {place.segment for place in places if place is not None}:
            await asyncio.to_thread(self._segments.renew, segments)

    async def expire(self) -> None:
        segments = {place.segment for place in self._places.values()}
        gone = await asyncio.to_thread(self._delete_old, segments)
        for request_id in [one for one, place in self._places.items() if place.segment in gone]:
            del self._places[request_id]
            self._in_memory.pop(request_id, None)

    def _delete_old(self, segments: Collection[int]) -> Collection[int]:
        """Deletes expired segments (blocking), and returns those of `segments` that no longer exist."""
        self._segments.delete_older_than(KEPT_SECONDS)
        return {segment for segment in segments if not self._segments.path(segment).exists()}

    async def close(self) -> None:
        await self._segments.close()

    async def _fill_in_datum(self, tenant_id: str, datum: Datum) -> Datum:
        if "logprobs" in datum.loss_fn_inputs and "sampled_mask" in datum.loss_fn_inputs:
            return datum
        targets = _targets(datum)
        logprobs, sampled_mask = np.zeros(len(targets), np.float32), np.zeros(len(targets), np.float32)
        start = 0
        for span in datum.loss_fn_input_spans:
            drawn = await self._drawn(tenant_id, span, targets[start : start + span.length])
            if drawn is not None:
                logprobs[start : start + span.length] = drawn
                sampled_mask[start : start + span.length] = 1.0
            start += span.length
        return replace(
            datum, loss_fn_inputs={**datum.loss_fn_inputs, "logprobs": logprobs, "sampled_mask": sampled_mask}
        )

    async def _drawn(self, tenant_id: str, span: ProvenanceSpan, targets: np.ndarray) -> np.ndarray | None:
        """Returns the recorded log-probabilities, float32 [length], or None for a span of the prompt."""
        recording, sequence = await self._find(tenant_id, span.sequence_id)
        tokens = recording.prompt if span.kind == "prompt" else recording.tokens[sequence]
        stop = span.offset + span.length
        if stop > len(tokens):
            raise OperationError(
                f"the {span.kind} span [{span.offset}, {stop}) of sequence {span.sequence_id} goes beyond its "
                f"{len(tokens)} {span.kind} tokens"
            )
        different = tokens[span.offset : stop] != targets
        if span.kind == "prompt":
            different &= targets != _NO_TARGET
        if different.any():
            first = int(different.argmax())
            raise OperationError(
                f"the {span.kind} span [{span.offset}, {stop}) of sequence {span.sequence_id} was recorded with token "
                f"{tokens[span.offset + first]} at {span.offset + first}, but target_tokens has "
                f"{targets[first]} there: spans must repeat what was recorded"
            )
        return recording.logprobs[sequence][span.offset : stop] if span.kind == "sampled" else None

    async def _find(self, tenant_id: str, sequence_id: str) -> tuple[Recording, int]:
        request_id, _, number = sequence_id.rpartition(":")
        recording = await self._load(request_id)
        if recording is None or recording.tenant_id != tenant_id or not number.isdecimal():
            raise _missing(sequence_id)
        if int(number) >= len(recording.tokens):
            raise _missing(sequence_id)
        return recording, int(number)

    async def _load(self, request_id: str) -> Recording | None:
        if request_id in self._in_memory:
            return self._in_memory[request_id]
        if request_id not in self._places:
            await self._index_earlier()
        if request_id not in self._places:
            return None
        try:
            recording = _recording(await self._segments.read(self._places[request_id]))
        except FileNotFoundError:  # expired
            return None
        self._remember(request_id, recording)
        return recording

    async def _index_earlier(self) -> None:
        """Indexes the recordings of earlier processes, on the first request for one that this process did not make."""
        async with self._reading:
            if not self._read_earlier:
                self._places.update(await asyncio.to_thread(self._earlier_places))
                self._read_earlier = True

    def _earlier_places(self) -> Mapping[str, RecordPosition]:
        places = {}
        for segment in self._segments.earlier:
            with contextlib.suppress(FileNotFoundError):  # expired
                for record in read_segment(self._segments.path(segment)):
                    places[str(record.header["request_id"])] = RecordPosition(segment, record.offset)
        return places

    def _remember(self, request_id: str, recording: Recording) -> None:
        self._in_memory[request_id] = recording
        while len(self._in_memory) > _MAX_IN_MEMORY:
            self._in_memory.popitem(last=False)


def _targets(datum: Datum) -> np.ndarray:
    """Returns the target tokens, int64 [T], after checking that the datum's spans cover them exactly."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None or targets.ndim != 1:
        raise OperationError("stable_reinforce needs one-dimensional target_tokens")
    if not datum.loss_fn_input_spans:
        raise OperationError(
            "stable_reinforce needs loss_fn_input_spans that name sequences sampled with record_stability_info "
            "(Datum.with_provenance)"
        )
    covered = sum(span.length for span in datum.loss_fn_input_spans)
    if covered != len(targets):
        raise OperationError(
            f"loss_fn_input_spans cover {covered} positions, target_tokens has {len(targets)}: they must tile it"
        )
    return targets


def _missing(sequence_id: str) -> OperationError:
    return OperationError(
        f"there is no recording of sequence {sequence_id}: sample it with record_stability_info=True, with the same "
        f"API key, no more than {KEPT_SECONDS / 3600:.0f} hours before; each use in training restarts them"
    )


def _header(request_id: str, recording: Recording) -> dict[str, object]:
    return {
        "request_id": request_id,
        "tenant_id": recording.tenant_id,
        "prompt": len(recording.prompt),
        "sequences": [len(tokens) for tokens in recording.tokens],
    }


def _body(recording: Recording) -> bytes:
    arrays = (recording.prompt, *recording.tokens, *recording.logprobs)
    return b"".join(array.tobytes() for array in arrays)


def _recording(record: LogRecord) -> Recording:
    lengths = record.header["sequences"]
    num_prompt = record.header["prompt"]
    assert isinstance(lengths, list) and isinstance(num_prompt, int)
    num_drawn = sum(lengths)
    tokens = np.frombuffer(record.body, np.int32, num_prompt + num_drawn)
    logprobs = np.frombuffer(record.body, np.float32, num_drawn, offset=4 * (num_prompt + num_drawn))
    borders = np.cumsum(lengths)[:-1]
    return Recording(
        str(record.header["tenant_id"]),
        tokens[:num_prompt],
        tuple(np.split(tokens[num_prompt:], borders)),
        tuple(np.split(logprobs, borders)),
    )
