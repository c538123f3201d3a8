"""Sends HTTP requests with retries and polls for results, in one background event loop per server.

A retry sends the same body and hence the same seq_id, so the server applies it once.
"""

import asyncio
import errno
import logging
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import ValidationError

from .. import __version__
from ..schemas.bounds import load_json
from ..schemas.futures import RequestFailed, RetrieveFutureRequest, SubmitResponse
from ..schemas.training import Wire
from .errors import APIConnectionError, APIStatusError, RequestFailedError, TrainhouseError, status_error
from .futures import APIFuture

T = TypeVar("T")
W = TypeVar("W", bound=Wire)

JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
ACCEPT_PROTOBUF = {"Accept": "application/x-protobuf"}
API = "/api/v1/"
LONG_POLLS = 256  # connections that wait for results at the same time; further polls queue
MIN_POLL_SECONDS = 0.5
_TIMEOUT_SECONDS, _CONNECT_SECONDS = 60.0, 10.0
LOG_RETRY_AFTER_SECONDS = 1.0  # a request that fails for longer logs that it is being retried
WAIT_LOG_INTERVAL_SECONDS = 60.0  # a reason for waiting is logged at most once in this time, for all results together

log = logging.getLogger("trainhouse")


class ServerConnection:
    """Connects to one server. Its coroutines run in its own event loop, which any thread enters through `run`."""

    def __init__(self, base_url: str, api_key: str, retry_seconds: float) -> None:
        self.base_url = _checked_url(base_url).rstrip("/").removesuffix(API.rstrip("/"))
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has characters that no key has, such as a line break: copy it again")
        self._retry_seconds = retry_seconds
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"X-API-Key": api_key, "User-Agent": f"trainhouse/{__version__}"},
            timeout=_timeout(_TIMEOUT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            follow_redirects=True,
        )
        self._polls = asyncio.Semaphore(LONG_POLLS)
        self._logged_at: dict[str, float] = {}  # by reason
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainhouse-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T]) -> APIFuture[T]:
        if self._closed:
            work.close()
            raise TrainhouseError("this client is closed: create a new ServiceClient")
        return APIFuture(asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop))

    async def _until_closed(self, work: Coroutine[object, object, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            raise TrainhouseError("the client was closed before this answer arrived") from None
        except httpx.TransportError as error:
            raise APIConnectionError(f"the connection to {self.base_url} was lost ({_reason(error)}): retry") from None

    def close(self) -> None:
        """Cancels pending requests, whose futures raise TrainhouseError, and ends the event loop."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def get(self, path: str, answer: type[W], **query: int | str) -> W:
        return self._read(answer, await self.request("GET", path, query=query))

    async def post(self, path: str, body: Wire, answer: type[W], headers: dict[str, str] | None = None) -> W:
        response = await self.request("POST", path, to_json(body), JSON | (headers or {}))
        return self._read(answer, response)

    def _read(self, answer: type[W], response: httpx.Response) -> W:
        """Raises APIConnectionError if the answer is none of a trainhouse server."""
        try:
            return answer.model_validate_json(response.content)
        except ValidationError:
            raise APIConnectionError(
                f"{response.url} answered {response.content[:40]!r}: is {self.base_url} a trainhouse server, not older "
                "than this client?"
            ) from None

    async def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        headers: dict[str, str] | None = None,
        query: Mapping[str, int | str] | None = None,
        accepted_status: int = 200,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> httpx.Response:
        """Sends a request, with retries, and returns the first response with a status of 2xx or `accepted_status`.

        Raises:
            APIStatusError: the server refused it, or kept failing until the retries ran out.
            APIConnectionError: the server could not be reached until the retries ran out.
        """
        backoff = RetryBackoff(self._retry_seconds)
        while True:
            response = await self._attempt(
                lambda: self._http.request(
                    method,
                    API + path,
                    content=content,
                    headers=headers,
                    params=query,
                    timeout=_timeout(timeout_seconds),
                )
            )
            if isinstance(response, APIConnectionError):
                await backoff.pause(response)
                continue
            if response.is_success or response.status_code == accepted_status:
                return response
            if method == "DELETE" and response.status_code == 404 and backoff.since:
                return response  # an earlier attempt succeeded and its response was lost
            failure = status_error(response.status_code, reason_in(response))
            if response.status_code < 500 and response.status_code not in (408, 429):
                raise failure
            await backoff.pause(failure, seconds_to_wait(response))

    async def _attempt(self, request: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response | APIConnectionError:
        """Returns the response or a transient failure; raises APIConnectionError if a retry cannot help."""
        try:
            return await request()
        except httpx.TransportError as error:
            if any(isinstance(each, ssl.SSLError) and each.reason == "WRONG_VERSION_NUMBER" for each in _causes(error)):
                plain = self.base_url.replace("https://", "http://", 1)
                raise APIConnectionError(
                    f"{self.base_url} speaks no TLS: write {plain}, or start the server with --tls-certificate"
                ) from None
            untrusted = next((each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)), None)
            if untrusted is None:
                return APIConnectionError(
                    f"no answer from {self.base_url} ({_reason(error)}): start a server there, or give another "
                    "base_url (TRAINHOUSE_BASE_URL)"
                )
            raise APIConnectionError(
                f"the certificate of {self.base_url} is not trusted ({untrusted.verify_message}): name a file "
                "of its authority in the environment variable SSL_CERT_FILE"
            ) from None

    async def submit(self, path: str, content: bytes, headers: dict[str, str] = JSON) -> SubmitResponse:
        return self._read(SubmitResponse, await self.request("POST", path, content, headers))

    async def result(
        self, submitted: SubmitResponse, decode: Callable[[bytes], T], headers: dict[str, str] | None = None
    ) -> T:
        """Polls until the operation is finished and returns its decoded result.

        Raises:
            RequestFailedError: the operation failed.
            APIStatusError, APIConnectionError: see `request`.
        """
        body = to_json(RetrieveFutureRequest(request_id=submitted.request_id))
        while True:
            async with self._polls:
                began = time.monotonic()
                response = await self.request(
                    "POST", "retrieve_future", body, JSON | (headers or {}), accepted_status=408
                )
            if PROTOBUF["Content-Type"] in response.headers.get("Content-Type", ""):
                return decode(response.content)
            answer = load_json(response.content or b"{}")
            if "error" in answer:
                failed = RequestFailed.model_validate(answer)
                raise RequestFailedError(failed.error, failed.category)
            if response.status_code != 408 and answer.get("type") != "try_again":
                return decode(response.content)
            if reason := answer.get("queue_state_reason"):
                self._log_wait(submitted.request_id, reason)
            if time.monotonic() - began < MIN_POLL_SECONDS:
                await asyncio.sleep(MIN_POLL_SECONDS)

    def _log_wait(self, request_id: str, reason: str) -> None:
        """Logs why a result is waiting, at most once per WAIT_LOG_INTERVAL_SECONDS, ignoring numbers."""
        now, kind = time.monotonic(), re.sub(r"\d+", "", reason)
        if now >= self._logged_at.get(kind, -WAIT_LOG_INTERVAL_SECONDS) + WAIT_LOG_INTERVAL_SECONDS:
            self._logged_at[kind] = now
            log.warning("%s waits: %s", request_id, reason)

    async def post_without_retry(self, path: str, body: Wire, timeout_seconds: float) -> None:
        """Sends a request without retries. Raises httpx.TransportError or APIStatusError."""
        response = await self._http.post(API + path, content=to_json(body), headers=JSON, timeout=timeout_seconds)
        if not response.is_success:
            raise status_error(response.status_code, reason_in(response))

    async def size_of(self, url: str) -> int | None:
        """Returns the size in bytes of a file that `download` would download; None if the server does not say or
        answer."""
        try:
            response = await self._http.send(self._file_request("HEAD", url))
        except httpx.HTTPError:
            return None
        length = response.headers.get("Content-Length", "")
        return int(length) if response.is_success and length.isdecimal() else None

    async def download(self, url: str, path: Path, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Downloads a file to `path`, from this server or from its file storage.

        Args:
            url: absolute, or relative to the server.
            on_bytes: called with the number of bytes of each piece.
        Raises:
            APIStatusError: the download was refused.
        """
        response = await self._http.send(self._file_request("GET", url), stream=True)
        try:
            if not response.is_success:
                await response.aread()
                raise status_error(response.status_code, reason_in(response))
            with path.open("wb") as file:
                async for piece in response.aiter_bytes():
                    file.write(piece)
                    on_bytes(len(piece))
        finally:
            await response.aclose()

    def _file_request(self, method: str, url: str) -> httpx.Request:
        request = self._http.build_request(method, url)
        if request.url.netloc != self._http.base_url.netloc:
            del request.headers["X-API-Key"]  # other hosts must not see the key, and a signed URL does not need it
        return request


class RetryBackoff:
    """Exponential backoff with jitter: pauses of 0.25 to 10 seconds, until `limit_seconds` after the first failure.

    since: time of the first failure (monotonic seconds), None before it.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._pause_seconds = 0.25
        self._has_logged = False
        self.since: float | None = None

    async def pause(self, failure: APIConnectionError | APIStatusError, at_least_seconds: float = 0.0) -> None:
        """Waits before the next attempt; raises `failure` instead if `limit_seconds` would be exceeded."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        pause = max(at_least_seconds, self._pause_seconds * random.uniform(0.75, 1.25))
        if now + pause > self.since + self._limit_seconds:
            raise failure
        if now - self.since > LOG_RETRY_AFTER_SECONDS and not self._has_logged:
            self._has_logged = True
            words = str(failure)
            stop = "" if words.endswith((".", "?")) else "."
            log.warning("%s%s Trying again for up to %.0f s (retry_seconds).", words, stop, self._limit_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, 10.0)
        await asyncio.sleep(pause)


def _checked_url(text: str) -> str:
    """Returns the URL unchanged. Raises APIConnectionError if it is not a base URL."""
    words = "it must begin with http:// or https://, such as http://127.0.0.1:8000"
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise APIConnectionError(f"{text!r} is not a base URL ({error}): {words}") from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 1) < 1 << 16:
        raise APIConnectionError(f"{text!r} is not a base URL: {words}")
    if url.path.rstrip("/") == "/v1":
        raise APIConnectionError(f"{text!r} is not a base URL: leave out {url.path}, which is for OpenAI's clients")
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: httpx.TransportError) -> str:
    """Prefers the operating system's message: httpx may only say that all connection attempts failed."""
    of_system = [_words(each) for each in _causes(error) if isinstance(each, OSError) and each.strerror]
    return of_system[-1] if of_system else str(error) or type(error).__name__


def _words(error: OSError) -> str:
    """Returns the operating system's message. The errno of a TLS error is OpenSSL's, so it keeps its own message."""
    number = error.errno or 0
    is_of_system = number in errno.errorcode and not isinstance(error, ssl.SSLError)
    return os.strerror(number) if is_of_system else str(error.strerror)


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=_CONNECT_SECONDS)


def to_json(body: Wire) -> bytes:
    return body.model_dump_json(exclude_none=True).encode()


def seconds_to_wait(response: httpx.Response) -> float:
    """Returns the pause that the server requests (Retry-After), in seconds, at most 60."""
    seconds, milliseconds = (response.headers.get(name, "") for name in ("Retry-After", "Retry-After-Ms"))
    if milliseconds.isdecimal():
        return min(int(milliseconds) / 1000, 60.0)
    return min(float(seconds), 60.0) if seconds.isdecimal() else 0.0


def reason_in(response: httpx.Response) -> str:
    """Returns the server's error message: `detail`, `error` or else the body."""
    try:
        body = load_json(response.content)
    except ValueError:
        return response.text or response.reason_phrase
    reason = (body.get("detail") or body.get("error")) if isinstance(body, dict) else None
    return reason if isinstance(reason, str) else response.text
