"""Lost answers: an operation is sent again with its seq_id, and is applied once."""

import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trainhouse
from trainhouse import ServiceClient
from trainhouse.client.connection import RetryBackoff

from ..live import LiveServer, live_server
from .test_live import MODEL, batch, loss, new_client, train

pytestmark = pytest.mark.anyio


@contextmanager
def proxy(target: str, faults: bool) -> Iterator[tuple[str, list[str]]]:
    """Forwards to `target`; of every five POSTs, one is answered with 503 and one answer is lost after it took effect.

    Yields the proxy's address and the list of faults so far.
    """
    made: list[str] = []
    address = urlsplit(target).netloc
    lock = threading.Lock()
    turns = iter(range(10**9))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                turn = next(turns) % 5 if faults and self.command == "POST" else 1
            if turn == 0:
                made.append("refused")
                self.answer(503, {}, b"busy")
                return
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            response = connection.getresponse()
            content = response.read()
            connection.close()
            if turn == 2:
                made.append("lost")
                self.close_connection = True
                return
            self.answer(response.status, {"Content-Type": response.headers.get("Content-Type", "")}, content)

        def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

        do_GET = do_POST = handle_any

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", made
        finally:
            server.shutdown()
            thread.join()


def losses_through(url: str) -> list[float]:
    """Returns the losses of two pipelined steps on a batch of three chunks, and the loss after them."""
    with ServiceClient(url, "tml-retries") as service:
        client = new_client(service)
        return [*train(client, batch(11), 2), loss(client, batch(11))]


@pytest.mark.slow
def test_lost_and_refused_requests_change_no_step(shared_server: LiveServer) -> None:
    with proxy(shared_server.url, faults=True) as (url, made):
        through_faults = losses_through(url)
    assert {"refused", "lost"} <= set(made)
    with proxy(shared_server.url, faults=False) as (url, made):
        undisturbed = losses_through(url)
    assert made == []
    # Operations may share passes differently, which changes the last digits; one step more or less would show.
    assert through_faults == pytest.approx(undisturbed, rel=1e-6)
    assert undisturbed[1:] != pytest.approx(undisturbed[:-1], rel=1e-2)


def test_an_unreachable_server_is_named_when_the_retries_end() -> None:
    with (
        ServiceClient("http://127.0.0.1:9", retry_seconds=0.1) as service,
        pytest.raises(
            trainhouse.APIConnectionError,
            match=r"127\.0\.0\.1:9 \(Connection refused\): start a server there, or",
        ),
    ):
        service.get_server_capabilities()


UNREACHABLE = """
import trainhouse
with trainhouse.ServiceClient("http://127.0.0.1:9", retry_seconds=0.1) as service:
    service.get_server_capabilities()
"""


def test_an_unreachable_server_gives_a_short_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", UNREACHABLE], capture_output=True, text=True, timeout=60, check=False)
    *trace, sentence = done.stderr.splitlines()
    assert sentence.startswith("trainhouse.client.errors.APIConnectionError: no answer from http://127.0.0.1:9 (Conn")
    assert not any("httpx" in line or "The above" in line or "During handling" in line for line in trace)
    assert sum(line.startswith("  File") for line in trace) <= 3


def test_an_invalid_key_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="characters that no key has") as refused:
        ServiceClient("http://127.0.0.1:9", "tml-secret\n")
    assert "secret" not in str(refused.value)


def test_retries_log_the_unreachable_server(caplog: pytest.LogCaptureFixture) -> None:
    with (
        ServiceClient("http://127.0.0.1:9", retry_seconds=5) as service,
        pytest.raises(trainhouse.APIConnectionError),
    ):
        service.get_server_capabilities()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "127.0.0.1:9" in message and message.endswith(
        "(TRAINHOUSE_BASE_URL). Trying again for up to 5 s (retry_seconds)."
    )


@pytest.mark.parametrize(("reason", "message"), [("busy", "busy. Trying"), ("Busy.", "Busy. Trying")])
async def test_the_reason_of_a_retry_ends_with_one_full_stop(
    reason: str, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.client.connection.LOG_RETRY_AFTER_SECONDS", -1.0)
    await RetryBackoff(300).pause(trainhouse.APIConnectionError(reason))
    assert caplog.messages == [f"{message} again for up to 300 s (retry_seconds)."]


def test_an_invalid_base_url_fails_at_once() -> None:
    with pytest.raises(
        trainhouse.APIConnectionError, match=r"'127\.0\.0\.1:9' is not a base URL: it must begin with http"
    ):
        ServiceClient("127.0.0.1:9")
    with pytest.raises(trainhouse.APIConnectionError, match="leave out /v1, which is for OpenAI's clients"):
        ServiceClient("http://127.0.0.1:9/v1")


def test_https_to_a_plain_http_server_is_reported(shared_server: LiveServer) -> None:
    """The error numbers of TLS must not be read as those of the operating system."""
    address = shared_server.url.replace("http://", "https://")
    command = [
        sys.executable,
        "-m",
        "trainhouse.server",
        "export",
        "tinker://r/weights/n",
        "/tmp/never-made",
        "--base-url",
    ]
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3 and f"speaks no TLS: write {shared_server.url}" in done.stderr, done.stderr


def test_an_answer_of_another_server_is_reported() -> None:
    with (
        serving_a_page() as url,
        ServiceClient(url, retry_seconds=1) as service,
        pytest.raises(trainhouse.APIConnectionError, match=rf"answered b'<html>.*is {url} a trainhouse server"),
    ):
        service.get_server_capabilities()


@contextmanager
def serving_a_page() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_closing_the_client_fails_pending_requests(shared_server: LiveServer) -> None:
    service = ServiceClient(shared_server.url, "tml-retries")
    client = new_client(service)
    sampler = service.create_sampling_client(base_model=MODEL)
    waiting = sampler.sample([5], 8, trainhouse.SamplingParams(max_tokens=900, stop=[]))
    service.close()
    # Either the server ends the session first, or the client closes first.
    with pytest.raises(trainhouse.TrainhouseError, match=r"cancelled|closed"):
        waiting.result(10)
    with pytest.raises(trainhouse.TrainhouseError, match="closed"):
        client.get_info()
    service.close()


@pytest.mark.slow
def test_waiting_for_many_results_logs_each_reason_once(
    tiny_models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeated() -> int:
        """Returns how many log lines repeat an earlier one, apart from numbers."""
        caplog.clear()
        with ServiceClient(server.url, "tml-retries") as service:
            sampler = service.create_sampling_client(base_model=MODEL)
            params = trainhouse.SamplingParams(max_tokens=100, stop=[])
            for future in [sampler.sample([5], 8, params) for _ in range(8)]:
                future.result(120)
        message = [re.sub(r"\d+", "", each.partition(" waits: ")[2]) for each in caplog.messages if " waits: " in each]
        assert message
        return len(message) - len(set(message))

    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, long_poll_seconds=0.02) as server:
        monkeypatch.setattr("trainhouse.client.connection.WAIT_LOG_INTERVAL_SECONDS", 600.0)
        assert repeated() == 0
        monkeypatch.setattr("trainhouse.client.connection.WAIT_LOG_INTERVAL_SECONDS", 0.0)
        assert repeated() > 0, "otherwise each result logs a line"


def test_a_timeout_while_waiting_does_not_cancel_the_request(shared_server: LiveServer) -> None:
    with ServiceClient(shared_server.url, "tml-retries") as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        future = sampler.sample([5], 1, trainhouse.SamplingParams(max_tokens=50, stop=[]))
        with pytest.raises(TimeoutError):
            future.result(0)
        assert len(future.result(60).sequences[0].tokens) == 50


A, B = "http://a:1", "http://b:1"


@pytest.mark.parametrize(
    ("variables", "url", "key"),
    [
        ({}, "http://127.0.0.1:8000", "tml-local"),
        ({"TINKER_BASE_URL": B, "TINKER_API_KEY": "b"}, B, "b"),
        ({"TRAINHOUSE_BASE_URL": A, "TRAINHOUSE_API_KEY": "a", "TINKER_API_KEY": "b"}, A, "a"),
        ({"TRAINHOUSE_BASE_URL": A, "TINKER_BASE_URL": B, "TINKER_API_KEY": "b"}, A, "tml-local"),
        ({"TINKER_API_KEY": "b"}, "http://127.0.0.1:8000", "tml-local"),
    ],
)
def test_url_and_key_of_the_environment_belong_together(
    variables: dict[str, str], url: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRAINHOUSE_BASE_URL", "TRAINHOUSE_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as service:
        connection = service._connection
        assert (connection.base_url, connection._http.headers["X-API-Key"]) == (url, key)
