"""Training scripts of the official SDK and our client end with the same results over a bad network."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..faults.proxy import Weather, proxy
from .conftest import Undisturbed
from .crashing import Crashing, assert_same, train

STEPS, MANY_STEPS = 15, 40
PACKAGES = ["tinker", "trainhouse"]


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    with Crashing(tiny_models["qwen3"], tmp_path_factory.mktemp("state")).running() as server:
        yield server


MIXED = Weather(delay_seconds=0.02, held=0.1, hold_seconds=0.2, cut=0.04, repeated=0.2, timeout_seconds=1.0)


@pytest.mark.full
@pytest.mark.parametrize("package", PACKAGES)
def test_mixed_network_faults_lose_and_repeat_nothing(package: str, server: Crashing, undisturbed: Undisturbed) -> None:
    with proxy(server.url, MIXED) as (url, made):
        found = train(server, STEPS, {}, package, url)
    assert all(made[what] for what in ("held", "request cut", "answer cut", "repeated")), made
    assert_same(found, undisturbed(STEPS))


WEATHERS = {
    "far": (Weather(delay_seconds=0.2), set()),
    "cut": (Weather(cut=0.08), {"request cut", "answer cut"}),
    "repeated": (Weather(repeated=0.5), {"repeated"}),
    "reordered": (Weather(held=0.3, hold_seconds=2.0), {"held"}),
    "impatient": (Weather(timeout_seconds=0.03), {"given up"}),
    "all": (
        Weather(delay_seconds=0.2, held=0.1, cut=0.04, repeated=0.2, timeout_seconds=1.0),
        {"request cut", "answer cut", "repeated", "held"},
    ),
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", WEATHERS)
def test_each_network_fault_changes_nothing(
    name: str, package: str, server: Crashing, undisturbed: Undisturbed
) -> None:
    weather, expected = WEATHERS[name]
    with proxy(server.url, weather, seed=1) as (url, made):
        found = train(server, MANY_STEPS, {}, package, url)
    print(name, package, dict(made))
    assert expected <= {what for what, times in made.items() if times}
    assert_same(found, undisturbed(MANY_STEPS))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", PACKAGES)
def test_polls_stay_below_a_proxy_timeout_of_a_minute(
    package: str, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The worker is stopped for longer than a minute: polls end before, and are repeated."""
    crashing = Crashing(tiny_models["qwen3"], tmp_path, {"snapshot_steps": 3, "hang_seconds": 300})
    with crashing.running(), proxy(crashing.url, Weather(timeout_seconds=60.0)) as (url, made):

        def pause_worker() -> None:
            crashing.signal_worker(signal.SIGSTOP)
            threading.Timer(75, crashing.signal_worker, (signal.SIGCONT,)).start()

        found = train(crashing, STEPS, {6: pause_worker}, package, url)
    assert made["given up"] == 0, made
    assert_same(found, undisturbed(STEPS))
