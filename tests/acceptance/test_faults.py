"""Training scripts end with the same results despite torn journals, damaged snapshots, a full disk, a hung worker, and
an operation that kills its worker each time.
"""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from trainhouse import AdamParams, Datum, GoneError, RequestFailedError, ServiceClient
from trainhouse.server.journal.journal import read_journal
from trainhouse.server.journal.strikes import STRIKE

from ..faults.damage import DAMAGES, TEARS, newest_segment, snapshots_of_runs
from ..faults.disk import filled, small_disk
from ..live import DEPLOYMENTS
from .conftest import Undisturbed
from .crashing import OPTIONS, Crashing, Faults, assert_same, train, until
from .poisonable import POISON, POISONABLE, REFUSED
from .training_script import MODEL

STEPS, MANY_STEPS = 15, 40


@pytest.fixture
def crashing(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[Crashing]:
    with Crashing(tiny_models["qwen3"], tmp_path).running() as crashing:
        yield crashing


# --- files that are damaged while no server runs ---


def tear(state_dir: Path, how: str, drawn: random.Random) -> None:
    for name in ("journal", "results"):
        TEARS[how](newest_segment(state_dir / name), drawn)


def damage_newest_snapshots(state_dir: Path, how: str, drawn: random.Random) -> None:
    """Damages the newest snapshot of each run that has two."""
    for snapshots in snapshots_of_runs(state_dir):
        if len(snapshots) > 1:
            DAMAGES[how](snapshots[-1], drawn)


def restart_torn(crashing: Crashing, how: str, drawn: random.Random) -> None:
    crashing.restart(lambda: tear(crashing.state_dir, how, drawn))


def restart_damaged(crashing: Crashing, how: str, drawn: random.Random) -> None:
    until(lambda: any(len(snapshots) > 1 for snapshots in snapshots_of_runs(crashing.state_dir)))
    crashing.restart(lambda: damage_newest_snapshots(crashing.state_dir, how, drawn))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_torn_journals_change_nothing(crashing: Crashing, undisturbed: Undisturbed) -> None:
    hows = [*TEARS, *TEARS]
    drawn = random.Random(1)
    steps = sorted(drawn.sample(range(1, MANY_STEPS), len(hows)))
    faults = {step: partial(restart_torn, crashing, how, drawn) for step, how in zip(steps, hows, strict=True)}
    found = train(crashing, MANY_STEPS, faults)
    assert crashing.log.count("is torn") >= 2 * len(hows)
    assert_same(found, undisturbed(MANY_STEPS))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_damaged_snapshots_change_nothing(crashing: Crashing, undisturbed: Undisturbed) -> None:
    crashing.options = {"snapshot_steps": 2}
    drawn = random.Random(2)
    steps = range(8, MANY_STEPS, 8)
    faults = {step: partial(restart_damaged, crashing, how, drawn) for step, how in zip(steps, DAMAGES, strict=True)}
    found = train(crashing, MANY_STEPS, faults)
    assert crashing.log.count("a snapshot cannot be used") >= 3
    assert_same(found, undisturbed(MANY_STEPS))


@pytest.mark.full
@pytest.mark.parametrize("part", ["header", "body"])
def test_damaged_acknowledged_operations_are_reported(part: str, crashing: Crashing) -> None:
    data = [Datum([5, 6, 7], {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})]
    with ServiceClient(crashing.url, "tml-damaged") as service:
        client = service.create_lora_training_client(MODEL, rank=4, seed=1)
        for _ in range(2):
            client.forward_backward(data, "cross_entropy").result(60)
            client.optim_step(AdamParams(learning_rate=1e-2)).result(60)
        crashing.restart(lambda: damage(newest_segment(crashing.state_dir / "journal"), part, seq_id=3))
        assert "is damaged" in crashing.log
        with pytest.raises((GoneError, RequestFailedError), match=r"is not live|cannot be rebuilt"):
            client.forward_backward(data, "cross_entropy").result(60)


def damage(segment: Path, part: str, seq_id: int) -> None:
    (entry,) = (entry for entry in read_journal(segment) if entry.header.seq_id == seq_id)
    content = segment.read_bytes()
    at = content.index(entry.body if part == "body" else b"{", entry.offset)
    segment.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


# --- a full disk ---


@dataclass
class Bystander:
    """Another tenant, who checks by plain REST how a server with a full disk answers."""

    url: str

    def __post_init__(self) -> None:
        session_id = self.post("create_session", {"sdk_version": "0"}).json()["session_id"]
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        self.model_id = self.post("create_model", create).json()["model_id"]
        assert self.submit(1).status_code == 200

    def post(self, path: str, body: dict) -> httpx.Response:
        headers = {"X-API-Key": "tml-bystander", "Prefer": "wait=30"}
        return httpx.post(f"{self.url}/api/v1/{path}", json=body, headers=headers, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": "tml-bystander"}, timeout=60)

    def submit(self, seq_id: int) -> httpx.Response:
        """The body is larger than the space left in the last pages of files."""
        row = {"model_input": [5] * 900, "loss_fn_inputs": {"target_tokens": [6] * 900, "weights": [1.0] * 900}}
        body = {"model_id": self.model_id, "seq_id": seq_id, "data": [row] * 4, "loss_fn": "cross_entropy"}
        return self.post("forward_backward", body)

    def check_answers(self) -> None:
        """Checks the answers while the disk is full."""
        refused = self.submit(2)
        assert refused.status_code == 503 and "free space" in refused.json()["detail"], refused.text
        known = self.post("retrieve_future", {"request_id": f"{self.model_id}:1"})
        assert known.status_code == 200 and "metrics" in known.json(), known.text
        for path in ("training_runs", "get_server_capabilities", "limits"):
            assert self.get(path).status_code == 200, path


@contextmanager
def on_a_small_disk(model: Path, directory: Path, deployment: str = "local") -> Iterator[Crashing]:
    with (
        small_disk(directory / "disk", 64 << 20) as disk,
        Crashing(model, directory, OPTIONS | DEPLOYMENTS[deployment], state_dir=disk / "state").running() as crashing,
    ):
        yield crashing


def fill_the_disk(crashing: Crashing, bystander: Bystander, seconds: float) -> None:
    # Creating a sampler fails on a full disk, so wait until both tenants have theirs.
    until(lambda: len(list((crashing.state_dir / "ephemeral").iterdir())) >= 2)
    with filled(crashing.state_dir.parent) as keep_full:
        for duration in (2.0, seconds):
            keep_full(duration)
            bystander.check_answers()


@pytest.mark.full
@pytest.mark.parametrize("deployment", ["local", "fsdp=2"])
def test_scripts_wait_while_the_disk_is_full(
    deployment: str, tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with on_a_small_disk(tiny_models["qwen3"], tmp_path, deployment) as crashing:
        bystander = Bystander(crashing.url)
        found = train(crashing, STEPS, {7: partial(fill_the_disk, crashing, bystander, 1.0)})
        assert bystander.submit(2).status_code == 200
    assert_same(found, undisturbed(STEPS))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_full_disks_and_crashes_change_nothing(
    tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The worker dies while the disk is full, and the server soon after."""
    with on_a_small_disk(tiny_models["qwen3"], tmp_path) as crashing:
        bystander = Bystander(crashing.url)

        def die_while_it_is_full() -> None:
            with filled(crashing.state_dir.parent) as keep_full:
                crashing.signal_worker(signal.SIGKILL)
                keep_full(5)
                bystander.check_answers()
            crashing.restart()

        faults: Faults = {
            18: partial(fill_the_disk, crashing, bystander, 20.0),
            24: die_while_it_is_full,
        }
        found = train(crashing, MANY_STEPS, faults)
        assert bystander.submit(2).status_code == 200
    assert_same(found, undisturbed(MANY_STEPS))


# --- workers that hang, or die of an operation ---


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("deployment", "steps"), [("local", (3, 17, 29)), ("fsdp=2", (3, 11))])
def test_a_hung_worker_is_replaced(
    deployment: str, steps: tuple[int, ...], tiny_models: dict[str, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """If there are several ranks, one hangs and the others wait for it."""
    num_steps = MANY_STEPS if deployment == "local" else STEPS
    crashing = Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | DEPLOYMENTS[deployment] | {"hang_seconds": 2})
    with crashing.running():
        hang = partial(crashing.signal_rank if deployment == "fsdp=2" else crashing.signal_worker, signal.SIGSTOP)
        found = train(crashing, num_steps, dict.fromkeys(steps, hang))
        assert crashing.log.count("it hung: ") >= len(steps)
    assert_same(found, undisturbed(num_steps))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strikes_before_restart", "deployment", "token"),
    [*((strikes, "local", POISON) for strikes in range(3)), (0, "fsdp=2", POISON), (0, "fsdp=2", REFUSED)],
)
def test_poison_operation_fails_alone(
    strikes_before_restart: int,
    deployment: str,
    token: int,
    tiny_models: dict[str, Path],
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    """Strikes survive a restart of the server. If there are two ranks, one dies each time, or refuses the operation
    while the other waits, for seconds and not for hang_seconds.
    """
    poison = [Datum([token] * 4, {"target_tokens": [5] * 4, "weights": [1.0] * 4})]
    crashing = Crashing(tiny_models["qwen3"], tmp_path, OPTIONS | DEPLOYMENTS[deployment], module=POISONABLE)
    with crashing.running(), ServiceClient(crashing.url, "tml-poisoner") as service:
        client = service.create_lora_training_client(MODEL, rank=4, seed=1)
        doomed = []

        def submit_poison() -> None:
            doomed.append(client.forward_backward(poison, "cross_entropy"))
            if strikes_before_restart:
                until(lambda: num_strikes(crashing.state_dir) >= strikes_before_restart)
                crashing.restart(assert_strikes_are_left)

        def assert_strikes_are_left() -> None:
            assert strikes_before_restart <= num_strikes(crashing.state_dir) < 3

        found = train(crashing, STEPS, {4: submit_poison})
        with pytest.raises(RequestFailedError, match="died 3 times"):
            doomed[0].result(240)
        assert num_strikes(crashing.state_dir) == 3 and "it hung" not in crashing.log
        client.forward_backward([Datum([5] * 4, poison[0].loss_fn_inputs)], "cross_entropy").result(60)
    assert_same(found, undisturbed(STEPS))


def num_strikes(state_dir: Path) -> int:
    segments = (state_dir / "journal").glob("*.segment")
    return sum(entry.header.kind == STRIKE for segment in segments for entry in read_journal(segment))
