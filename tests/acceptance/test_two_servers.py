"""Two servers on one PostgreSQL and one state directory: scripts call the standby, and the leader is lost."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ..live import DEPLOYMENTS
from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, assert_same, train, until

LEASE_SECONDS = 2.0


@dataclass
class Pair:
    """first: initially holds the lease."""

    first: Crashing
    second: Crashing

    @property
    def servers(self) -> tuple[Crashing, Crashing]:
        return self.first, self.second

    def stop_first(self, seconds: float) -> threading.Timer:
        """Suspends it, like a sleeping machine or a hypervisor that migrates it."""
        os.kill(self.first.pid, signal.SIGSTOP)
        resume = threading.Timer(seconds, os.kill, (self.first.pid, signal.SIGCONT))
        resume.start()
        return resume


@contextmanager
def pair(model: Path, directory: Path, database_url: str, deployment: str = "local") -> Iterator[Pair]:
    options = {**OPTIONS, **DEPLOYMENTS[deployment], "database_url": database_url, "lease_seconds": LEASE_SECONDS}
    servers = [Crashing(model, directory / name, options, state_dir=directory / "state") for name in "ab"]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running())
        yield Pair(*servers)


def readiness(server: Crashing) -> dict[str, object]:
    return httpx.get(f"{server.url}/api/v1/readyz").json()


def live_state(server: Crashing) -> list[str]:
    return sorted(path.name for path in server.state_dir.glob("live-*"))


def refused_in(log: str) -> bool:
    return "no longer has the lease" in log or "the lease of epoch 1 has run out" in log


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_steps", "deployment"), [(15, "local"), (40, "ray"), (15, "fsdp=2")], ids=str)
def test_standby_takes_over_when_the_leader_is_killed(
    num_steps: int,
    deployment: str,
    tiny_models: dict[str, Path],
    undisturbed: Undisturbed,
    tmp_path: Path,
    postgres_url: str,
) -> None:
    with pair(tiny_models["qwen3"], tmp_path, postgres_url, deployment) as servers:
        assert readiness(servers.second) | {"status": "standby", "holder": servers.first.url} == readiness(
            servers.second
        )
        kill = {num_steps // 2: lambda: os.kill(servers.first.pid, signal.SIGKILL)}
        found = train(servers.first, num_steps, kill, url=servers.second.url)
        assert readiness(servers.second)["status"] == "ready"
        assert live_state(servers.second) == ["live-2"]
    assert_same(found, undisturbed(num_steps))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_suspended_leader_does_no_harm_after_its_lease(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path, postgres_url: str
) -> None:
    with pair(tiny_models["qwen3"], tmp_path, postgres_url) as servers:
        found = train(servers.first, 40, {13: lambda: servers.stop_first(4 * LEASE_SECONDS)}, url=servers.second.url)
        until(lambda: readiness(servers.first) == readiness(servers.first) | {"holder": servers.second.url})
        assert refused_in(servers.first.log) and "taking over, with epoch 2" in servers.second.log
        assert live_state(servers.second) == ["live-2"]
        # The first server can take over again.
        again = train(
            servers.first, 15, {5: lambda: os.kill(servers.second.pid, signal.SIGTERM)}, url=servers.first.url
        )
        assert readiness(servers.first)["status"] == "ready"
        assert live_state(servers.first) == ["live-3"]
    assert_same(found, undisturbed(40))
    assert_same(again, undisturbed(15))
