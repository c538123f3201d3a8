"""A bad network: an HTTP/1.1 proxy that delays, cuts, repeats, holds back and gives up, by a seed."""

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"
_GATEWAY_TIMEOUT = b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 7\r\nContent-Type: text/html\r\n\r\n<html/>"


@dataclass(frozen=True)
class Weather:
    """Faults of the network; shares are fractions of the requests. Answers are forwarded as a whole.

    delay_seconds: each way.
    held: share that is held for up to hold_seconds, while later requests pass.
    cut: share that is cut in the middle of the request; as many are cut in the middle of the answer.
    repeated: share that is sent twice, one after the other or at once; one of the answers is returned.
    timeout_seconds: time without an answer after which the proxy answers 504.
    """

    delay_seconds: float = 0.0
    held: float = 0.0
    hold_seconds: float = 0.5
    cut: float = 0.0
    repeated: float = 0.0
    timeout_seconds: float = 600.0


class Proxy:
    """Forwards requests with the faults of the weather.

    made: counts of what was done to requests, by name.
    """

    def __init__(self, target: str, weather: Weather, seed: int) -> None:
        self.made: Counter[str] = Counter()
        self._address = urlsplit(target)
        self._weather = weather
        self._drawn = random.Random(seed)

    async def run(self, listening: "asyncio.Future[int]", stop: asyncio.Event) -> None:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            listening.set_result(server.sockets[0].getsockname()[1])
            await stop.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while (answer := await self._pass_on(await _read_message(reader))).is_whole:
                await _write(writer, answer.content)
            await _write(writer, answer.content)
        writer.close()

    async def _pass_on(self, request: bytes) -> "_Answer":
        weather, drawn = self._weather, self._drawn
        self.made["passed on"] += 1
        await asyncio.sleep(weather.delay_seconds)
        if self._happens("held", weather.held):
            await asyncio.sleep(drawn.uniform(0, weather.hold_seconds))
        if self._happens("request cut", weather.cut):
            await self._send(request[: drawn.randrange(len(request))])
            return _Answer(b"", is_whole=False)
        try:
            async with asyncio.timeout(weather.timeout_seconds):
                answer = await (self._twice if self._happens("repeated", weather.repeated) else self._exchange)(request)
        except TimeoutError:
            self.made["given up"] += 1
            return _Answer(_GATEWAY_TIMEOUT)
        await asyncio.sleep(weather.delay_seconds)
        if self._happens("answer cut", weather.cut):
            return _Answer(answer[: drawn.randrange(len(answer))], is_whole=False)
        return _Answer(answer)

    def _happens(self, what: str, share: float) -> bool:
        happens = self._drawn.random() < share
        self.made[what] += happens
        return happens

    async def _twice(self, request: bytes) -> bytes:
        if self._drawn.random() < 0.5:
            answers = await asyncio.gather(self._exchange(request), self._exchange(request))
        else:
            answers = [await self._exchange(request), await self._exchange(request)]
        return self._drawn.choice(answers)

    async def _exchange(self, request: bytes) -> bytes:
        async with self._connected() as (reader, writer):
            await _write(writer, request)
            return await _read_message(reader)

    async def _send(self, part: bytes) -> None:
        async with self._connected() as (_, writer):
            await _write(writer, part)

    @contextlib.asynccontextmanager
    async def _connected(self):
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@dataclass(frozen=True)
class _Answer:
    content: bytes
    is_whole: bool = True


async def _write(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(content)
    await writer.drain()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """Reads a request or an answer; raises IncompleteReadError if none arrives."""
    head = await reader.readuntil(_HEAD_END)
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return head + await _read_chunks(reader)
    return head + await reader.readexactly(int(fields.get(b"content-length", 0)))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    read = b""
    while True:
        line = await reader.readline()
        read += line + await reader.readexactly(int(line, 16) + 2)
        if int(line, 16) == 0:
            return read


@contextmanager
def proxy(target: str, weather: Weather, seed: int = 0) -> Iterator[tuple[str, Counter[str]]]:
    """Yields the proxy's URL and the counts of what it has done so far."""
    made = Proxy(target, weather, seed)
    with asyncio.Runner() as runner:
        loop, stop = runner.get_loop(), asyncio.Event()
        listening: asyncio.Future[int] = loop.create_future()
        is_listening = threading.Event()
        listening.add_done_callback(lambda _: is_listening.set())
        thread = threading.Thread(target=runner.run, args=(made.run(listening, stop),))
        thread.start()
        try:
            is_listening.wait(10)
            yield f"http://127.0.0.1:{listening.result()}", made.made
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
