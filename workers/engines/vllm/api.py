"""HTTP client of a vLLM server. Only this module uses the formats of vLLM's requests and responses.

Prompts and samples are token ids both ways, so no text is tokenized twice. Log-probabilities are the model's at
temperature 1: vLLM's `--logprobs-mode raw_logprobs`, its default.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ....schemas.errors import OperationError
from ....schemas.sampling import EMPTY_LOGPROB, TopkLogprobs
from ...protocol.calls import SampleJob
from .server import VllmServer

logger = logging.getLogger(__name__)

_TIMEOUT = httpx.Timeout(None, connect=10.0, write=60.0)

# vLLM closes idle connections after 5 seconds: a request sent at that moment would fail.
_KEPT_ALIVE_SECONDS = 2.0

# Larger responses are parsed in a thread.
_LARGE_BYTES = 256 << 10

SAID_AS_THEY_ARE = ("top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
SAID_PARAMS = frozenset({"max_tokens", "seed", "stop", "temperature", "top_k", "logit_bias", *SAID_AS_THEY_ARE})
"""The fields of SamplingParams that reach vLLM."""

# Both native sampling and vLLM are greedy below this.
_LOWEST_TEMPERATURE = 1e-5


class VllmUnreachable(Exception):
    """The server is down or broke the connection. reached: it had the request, which may have crashed it."""

    def __init__(self, message: str, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class VllmFailed(VllmUnreachable):
    """The server responded with an internal error."""


class UnknownModel(Exception):
    """The server has no model of that name, or lost it in a restart."""


@dataclass(frozen=True)
class VllmModel:
    """The base model under the name that the server uses."""

    name: str
    max_length: int


@dataclass(frozen=True)
class SampleRange:
    """One request for the samples first, first + 1, ... of a job."""

    first: int
    num_samples: int


@dataclass(frozen=True, eq=False)
class VllmChoice:
    """A part of sample number `sample` of a request, from a response or one of its events.

    tokens: int32, [n].
    logprobs: float32, [n].
    finish_reason: None while the sample continues.
    """

    sample: int
    tokens: np.ndarray
    logprobs: np.ndarray
    top: TopkLogprobs | None
    finish_reason: str | None


@dataclass(frozen=True, eq=False)
class VllmCompletion:
    """Holds a response, or one event of a stream. num_cached: cached prompt tokens, if vLLM reports them."""

    choices: list[VllmChoice]
    num_cached: int | None


class VllmApi:
    """Every method may raise VllmUnreachable, UnknownModel, and OperationError if the server refuses the request."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_ALIVE_SECONDS)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)

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
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": False}
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

    async def is_healthy(self, within_seconds: float = 10.0) -> bool:
        try:
            return (await self._client.get(f"{self._server.url}/health", timeout=within_seconds)).is_success
        except httpx.TransportError:
            return False

    async def unload_adapter(self, name: str) -> None:
        """Unloads the adapter. Ignored if vLLM does not have it."""
        with contextlib.suppress(OperationError, UnknownModel, VllmUnreachable):
            await self._request_json("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, job: SampleJob, ask: SampleRange, model: str, max_tokens: int) -> VllmCompletion:
        answer = await self._request_json("POST", "/v1/completions", _body(job, ask, model, max_tokens))
        return await _read(answer, job)

    async def stream(
        self, job: SampleJob, ask: SampleRange, model: str, max_tokens: int
    ) -> AsyncGenerator[VllmCompletion, None]:
        """Yields the samples while they grow."""
        body = _body(job, ask, model, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        request = self._request("POST", "/v1/completions", body)
        async with self._translate_errors(), aclosing(await self._client.send(request, stream=True)) as response:
            if not response.is_success:
                await response.aread()
                _raise_for_status(response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield await _read(line.removeprefix("data: "), job)

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


def is_greedy(job: SampleJob) -> bool:
    return job.params.temperature < _LOWEST_TEMPERATURE


def _body(job: SampleJob, ask: SampleRange, model: str, max_tokens: int) -> dict[str, object]:
    """Sends every parameter explicitly: vLLM may take missing ones from its own configuration."""
    params = job.params
    assert params.seed is not None, "the seed is drawn at submit"
    return {
        "model": model,
        "prompt": job.prompt.tolist(),
        "add_special_tokens": False,
        "n": ask.num_samples,
        # vLLM adds the index of the sample within the request.
        "seed": _hash_seed(params.seed) + ask.first,
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy(job) else params.temperature,
        "top_k": max(0, params.top_k),
        "logit_bias": {str(token): bias for token, bias in (params.logit_bias or {}).items()},
        **{name: getattr(params, name) for name in SAID_AS_THEY_ARE},
        "stop": list(job.stop_strings),
        "stop_token_ids": list(job.stop_token_ids),
        # The stop tokens include the model's end-of-sequence tokens if these must stop the sample.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": job.topk_sample_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        # Without a salt, response times and cached-token counts would reveal other tenants' prompts.
        **({"cache_salt": job.tenant_id} if job.tenant_id else {}),
    }


def _hash_seed(seed: int) -> int:
    """Maps the seed to 62 bits, far from the next seed's, because sample i uses seed + i.

    Else the samples of seed 1 would be those of seed 0, shifted by one.
    """
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest()) >> 2


async def _read(text: str | bytes, job: SampleJob) -> VllmCompletion:
    """Parses a response or event. Raises VllmFailed if the event is an error."""
    if len(text) < _LARGE_BYTES:
        return _parse(json.loads(text), job)
    return await asyncio.to_thread(lambda: _parse(json.loads(text, parse_float=_number), job))


def _number(text: str) -> float:
    """Parses one number. A Python function lets other threads run; without it json holds the GIL to the end."""
    return float(text)


def _parse(answer: dict[str, Any], job: SampleJob) -> VllmCompletion:
    if "error" in answer:
        raise VllmFailed(str(answer["error"].get("message", answer["error"])), reached=True)
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return VllmCompletion([_piece(choice, job) for choice in answer["choices"]], details.get("cached_tokens"))


def _piece(choice: dict[str, Any], job: SampleJob) -> VllmChoice:
    tokens, found = choice.get("token_ids") or [], choice.get("logprobs") or {}
    return VllmChoice(
        sample=choice["index"],
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(found.get("token_logprobs") or [], np.float32),
        top=_top(found.get("top_logprobs") or [], job.topk_sample_logprobs) if job.topk_sample_logprobs else None,
        finish_reason=choice.get("finish_reason"),
    )


def _top(rows: list[dict[str, float]], k: int) -> TopkLogprobs:
    """Keeps the k likeliest of each token: vLLM adds the sampled token even if it is not among them."""
    top = TopkLogprobs(np.zeros((len(rows), k), np.int32), np.full((len(rows), k), EMPTY_LOGPROB, np.float32))
    for position, row in enumerate(rows):
        _fill(top, position, {int(token.removeprefix("token_id:")): logprob for token, logprob in row.items()})
    return top


def _fill(top: TopkLogprobs, position: int, entries: dict[int, float]) -> None:
    k = top.token_ids.shape[1]
    for rank, (token, logprob) in enumerate(sorted(entries.items(), key=lambda entry: -entry[1])[:k]):
        top.token_ids[position, rank], top.logprobs[position, rank] = token, logprob


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
