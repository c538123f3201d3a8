"""HTTP client of a vLLM server. Only this module and requests.py use the formats of vLLM's requests and responses.

Prompts and samples are token ids both ways, so no text is tokenized twice. Log-probabilities are the model's at
temperature 1: vLLM's `--logprobs-mode raw_logprobs`, its default.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np

from ....schemas.errors import OperationError
from ....schemas.sampling import EMPTY_LOGPROB, GuessCounts, SampledSequence, SampleResponse, TopkLogprobs
from ...protocol.calls import SampledPart, SampleJob
from ...protocol.timeouts import VLLM_CONNECT_SECONDS, VLLM_HEALTH_SECONDS, VLLM_SEND_SECONDS
from ...scheduler.work import OnProgress
from ..in_flight import cancel_and_wait
from .requests import VllmModel, VllmRequest, is_greedy
from .serve import PATH
from .server import VllmServer

logger = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(None, connect=VLLM_CONNECT_SECONDS, write=VLLM_SEND_SECONDS)

# vLLM closes idle connections after 5 seconds: a request sent at that moment would fail.
_KEPT_ALIVE_SECONDS = 2.0

# Larger responses are parsed in a thread.
_LARGE_BYTES = 256 << 10

# Health checks within the time for which requests wait.
_NUM_LOOKS = 12

Done = TypeVar("Done")

Part = Literal["model", "draft"]
"""A part of vLLM whose weights can be replaced."""


class VllmUnreachable(Exception):
    """The server is down or broke the connection. reached: it had the request, which may have crashed it."""

    def __init__(self, message: str, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class VllmFailed(VllmUnreachable):
    """The server responded with an internal error."""


class UnknownModel(Exception):
    """The server has no model of that name, or lost it in a restart."""


@dataclass(frozen=True, eq=False)
class VllmCompletion:
    """Holds a response, or one event of a stream.

    parts: numbered by their samples' places in the request. num_cached: cached prompt tokens, if vLLM reports them.
    guesses: of a request's only sample, at its end, if its own draft proposed the tokens.
    """

    parts: list[SampledPart]
    num_cached: int | None
    guesses: GuessCounts | None


class VllmApi:
    """Every method may raise VllmUnreachable, UnknownModel, and OperationError if the server refuses the request."""

    def __init__(self, server: VllmServer, is_mixed: bool = False) -> None:
        """is_mixed: whether adapters are in the form that vLLM reads with --enable-mixed-moe-lora-format alone."""
        self._server = server
        self._is_mixed = is_mixed
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_ALIVE_SECONDS)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)
        self._checked_at = self._healthy_at = -math.inf

    async def close(self) -> None:
        await self._client.aclose()

    async def model(self, name: str) -> VllmModel:
        """Returns the model of this name, else the only model served. Raises OperationError."""
        cards = json.loads(await self._request_json("GET", "/v1/models"))["data"]
        bases = [card for card in cards if card.get("parent") is None]
        found = [card for card in bases if card["id"] == name] or (bases if len(bases) == 1 else [])
        if not found:
            served = ", ".join(card["id"] for card in bases)
            raise OperationError(
                f"the vLLM at {self._server.url} serves {served}, not {name}: start it with --served-model-name {name}",
                "server",
            )
        return VllmModel(found[0]["id"], found[0]["max_model_len"])

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Loads the adapter. Does nothing if vLLM has one of that name."""
        # Not in place: vLLM would read the files again at every step of a request.
        body: dict[str, object] = {"lora_name": name, "lora_path": str(directory), "load_inplace": False}
        body |= {"is_3d_lora_weight": True} if self._is_mixed else {}
        try:
            await self._request_json("POST", "/v1/load_lora_adapter", body)
        except (OperationError, VllmFailed) as error:
            if "has already been loaded" in str(error):
                return
            if isinstance(error, VllmFailed) and not await self.is_healthy():
                raise
            logger.error("vLLM cannot load adapter %s from %s: %s", name, directory, error)
            reason = str(error).replace(str(directory), "its directory")
            raise OperationError(
                f"vLLM cannot load adapter {name}: {reason}; it must see the server's directories, run with"
                " --enable-lora, a --max-lora-rank of at least this rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                "server",
            ) from None

    async def load_weights(self, source: str, part: Part) -> None:
        """Replaces the weights of the base model or the draft by those in the directory, or of the hub id.

        After a failure they are undefined, and the server must start again.
        """
        await self._request_json("POST", PATH, {"path": source, "part": part})

    async def is_healthy(self, within_seconds: float = VLLM_HEALTH_SECONDS) -> bool:
        try:
            return (await self._client.get(f"{self._server.url}/health", timeout=within_seconds)).is_success
        except httpx.TransportError:
            return False

    async def unload_adapter(self, name: str) -> None:
        """Unloads the adapter. Ignored if vLLM does not have it."""
        with contextlib.suppress(OperationError, UnknownModel, VllmUnreachable):
            await self._request_json("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, request: VllmRequest) -> VllmCompletion:
        answer = await self._request_json("POST", "/v1/completions", request.body())
        return await _read(answer, request.job)

    async def stream(self, request: VllmRequest) -> AsyncGenerator[VllmCompletion, None]:
        """Yields the samples while they grow."""
        body = request.body() | {"stream": True, "stream_options": {"include_usage": True}}
        sent = self._request("POST", "/v1/completions", body)
        async with self._translate_errors(), aclosing(await self._client.send(sent, stream=True)) as response:
            if not response.is_success:
                await response.aread()
                _raise_for_status(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield await _read(line.removeprefix("data: "), request.job)

    async def watch(self, work: Coroutine[None, None, Done]) -> Done:
        """Returns the result of `work`. Raises OperationError if the server hangs, which keeps its connections open."""
        if self._server.retry_seconds is None:
            return await work
        tasks = working, silence = asyncio.create_task(work), asyncio.create_task(self._silence())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if silence.done() and not working.done():
                raise self._server.silence_error("it accepts requests but does not respond")
            return working.result()
        finally:
            await cancel_and_wait(tasks)

    async def _silence(self) -> None:
        """Returns when the server has been silent for `retry_seconds`."""
        most = self._server.retry_seconds or math.inf
        started, pause = time.monotonic(), most / _NUM_LOOKS
        while time.monotonic() - max(started, self._healthy_at) < most:
            await asyncio.sleep(pause)
            # One check serves all waiting requests.
            if time.monotonic() - self._checked_at >= pause:
                self._checked_at = time.monotonic()
                if await self.is_healthy(pause):
                    self._healthy_at = time.monotonic()

    async def _request_json(self, method: str, path: str, body: object = None) -> bytes:
        async with self._translate_errors():
            response = await self._client.send(self._request(method, path, body))
        if not response.is_success:
            _raise_for_status(response)
        return response.content

    def _request(self, method: str, path: str, body: object) -> httpx.Request:
        key = self._server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self._client.build_request(method, f"{self._server.url}{path}", json=body, headers=headers)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise VllmUnreachable(f"cannot be reached: {error}", reached=False) from None
        except httpx.TransportError as error:
            raise VllmUnreachable(f"broke the connection: {error or type(error).__name__}", reached=True) from None


class SampleCollector:
    """The samples of a job while they grow."""

    def __init__(self, job: SampleJob, on_progress: OnProgress | None) -> None:
        self._job = job
        self._on_progress = on_progress
        self._parts: defaultdict[int, list[SampledPart]] = defaultdict(list)
        self._num_cached: list[int] = []
        self._guesses: list[GuessCounts] = []

    def add(self, request: VllmRequest, answer: VllmCompletion) -> None:
        if answer.num_cached is not None:
            self._num_cached.append(answer.num_cached)
        if answer.guesses is not None:
            self._guesses.append(answer.guesses)
        for part in answer.parts:
            drawn = request.samples[part.sample]
            # All samples of a greedy job are equal, and one was drawn.
            for sample in range(self._job.num_samples) if is_greedy(self._job) else (drawn,):
                own = replace(part, sample=sample)
                self._parts[sample].append(own)
                if self._on_progress is not None and len(own.tokens):
                    self._on_progress((own,))

    def response(self) -> SampleResponse:
        """Returns all samples, which must have ended."""
        sequences = tuple(_sequence(self._parts[sample]) for sample in range(self._job.num_samples))
        hits = min(self._num_cached, default=0)
        return SampleResponse(sequences, prompt_cache_hit_tokens=hits, guesses=_sum(self._guesses))


def _sequence(parts: list[SampledPart]) -> SampledSequence:
    if not parts or parts[-1].stop_reason is None:
        raise VllmUnreachable("did not end a sample", reached=True)
    tops = [part.topk_logprobs for part in parts if part.topk_logprobs is not None]
    return SampledSequence(
        stop_reason=parts[-1].stop_reason,
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        topk_logprobs=TopkLogprobs(
            np.concatenate([top.token_ids for top in tops]), np.concatenate([top.logprobs for top in tops])
        )
        if tops
        else None,
    )


def _sum(guesses: Sequence[GuessCounts]) -> GuessCounts | None:
    """Returns None if no pass has verified draft tokens."""
    if not (passes := sum(each.passes for each in guesses)):
        return None
    by_accepted = zip(*(each.by_accepted for each in guesses), strict=True)
    drafted, accepted = sum(each.drafted for each in guesses), sum(each.accepted for each in guesses)
    return GuessCounts(passes, drafted, accepted, tuple(map(sum, by_accepted)))


async def _read(text: str | bytes, job: SampleJob) -> VllmCompletion:
    """Parses a response or event. Raises VllmFailed if the event is an error."""
    if len(text) < _LARGE_BYTES:
        return _parse(json.loads(text), job)
    # Parsing numbers by a Python function lets other threads run; without it json holds the GIL to the end.
    return await asyncio.to_thread(lambda: _parse(json.loads(text, parse_float=lambda number: float(number)), job))


def _parse(answer: dict[str, Any], job: SampleJob) -> VllmCompletion:
    if "error" in answer:
        raise VllmFailed(str(answer["error"].get("message", answer["error"])), reached=True)
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    guesses = (answer.get("metrics") or {}).get("speculative_decoding")
    return VllmCompletion(
        [_part(choice, job) for choice in answer["choices"]],
        details.get("cached_tokens"),
        _guesses(guesses) if guesses and job.draft_id is not None else None,
    )


def _guesses(counts: dict[str, Any]) -> GuessCounts:
    return GuessCounts(
        passes=counts["num_spec_steps"],
        drafted=counts["num_draft_tokens"],
        accepted=counts["num_accepted_draft_tokens"],
        by_accepted=tuple(counts["acceptance_histogram"]),
    )


def _part(choice: dict[str, Any], job: SampleJob) -> SampledPart:
    """Parses a part of a sample. Raises VllmUnreachable if vLLM ended the sample with an error."""
    reason, found = choice.get("finish_reason"), choice.get("logprobs") or {}
    if reason not in (None, "stop", "length"):
        raise VllmUnreachable(f"ended a sample with {reason}", reached=True)
    return SampledPart(
        sample=choice["index"],
        tokens=np.array(choice.get("token_ids") or [], np.int32),
        logprobs=np.array(found.get("token_logprobs") or [], np.float32),
        topk_logprobs=_top(found.get("top_logprobs") or [], job.topk_sample_logprobs)
        if job.topk_sample_logprobs
        else None,
        stop_reason=reason,
    )


def _top(rows: list[dict[str, float]], k: int) -> TopkLogprobs:
    """Keeps the k likeliest of each token: vLLM adds the sampled token even if it is not among them."""
    top = TopkLogprobs(np.zeros((len(rows), k), np.int32), np.full((len(rows), k), EMPTY_LOGPROB, np.float32))
    for position, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(sorted(row.items(), key=lambda entry: -entry[1])[:k]):
            top.token_ids[position, rank] = int(token.removeprefix("token_id:"))
            top.logprobs[position, rank] = logprob
    return top


def _raise_for_status(response: httpx.Response) -> None:
    message = _message(response)
    if response.status_code >= 500:
        raise VllmFailed(f"responded with {response.status_code}: {message}", reached=True)
    if response.status_code == 404 and "does not exist" in message:
        raise UnknownModel(message)
    raise OperationError(f"vLLM refuses the request: {message}", "user" if response.status_code == 400 else "server")


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
