"""Messages to systemd, received on a socket as systemd's own."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from trainhouse.server.serving.service_manager import notify, watchdog

from ...live import live_server

WATCHDOG_SECONDS = 0.4


class Systemd:
    """Receives what a process sends to NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)

    def received(self, seconds: float = 0.0) -> list[str]:
        """Returns the messages that have arrived, after waiting."""
        time.sleep(seconds)
        messages = []
        self._socket.setblocking(False)
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    name = str(tmp_path / "notify") if request.param == "file" else f"@trainhouse-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1e6)))
    received = Systemd(name.replace("@", "\0"))
    yield received
    received.close()


def test_a_message_has_one_assignment_a_line(systemd: Systemd) -> None:
    notify("READY=1", "STATUS=ready: it serves")
    assert systemd.received() == ["READY=1\nSTATUS=ready: it serves"]


def test_without_systemd_nothing_is_sent(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
    assert systemd.received() == []


def test_a_socket_that_is_gone_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")
    assert "systemd cannot be notified of READY=1: [Errno 2]" in caplog.text


def test_the_watchdog_is_fed_only_while_the_event_loop_runs(systemd: Systemd) -> None:
    async def fed_then_blocked() -> tuple[list[str], list[str]]:
        with watchdog():
            await asyncio.sleep(2 * WATCHDOG_SECONDS)
            return systemd.received(), systemd.received(2 * WATCHDOG_SECONDS)  # the latter blocks the loop

    fed, blocked = asyncio.run(fed_then_blocked())
    assert fed == ["WATCHDOG=1"] * len(fed) and len(fed) >= 3, "twice in each period"
    assert blocked == []


def test_the_watchdog_of_another_process_is_not_fed(systemd: Systemd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))

    async def wait() -> None:
        with watchdog():
            await asyncio.sleep(0.05)

    asyncio.run(wait())
    assert systemd.received() == []


@pytest.mark.slow
@pytest.mark.parametrize("systemd", ["file"], indirect=True)
def test_a_server_reports_when_it_is_ready_and_when_it_stops(
    systemd: Systemd, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    with live_server({"tiny/llama": tiny_models["llama"]}, tmp_path / "state") as server:
        assert httpx.get(f"{server.url}/api/v1/readyz").is_success
        fed, ready = systemd.received()
        assert fed == "WATCHDOG=1"
        assert ready.startswith(f"READY=1\nSTATUS=ready: {server.url} serves tiny/llama")
    assert systemd.received() == ["STOPPING=1"]
