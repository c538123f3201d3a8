"""Trackers of metrics, each with its real package and without a network; what they wrote is read back from files."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trainhouse
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from trainhouse import AdamParams, Datum, RestClient, ServiceClient, TrainingClient
from trainhouse.client.trackers import MlflowTracker, RunFollower, TensorBoardTracker, Tracker, WandbTracker
from wandb.proto.wandb_internal_pb2 import Record

from ..live import LiveServer

pytestmark = pytest.mark.slow

MODEL = "tiny/chat"
DATA = [Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]

Values = dict[str, list[tuple[int, float]]]
"""The step and value of each logged value, by metric, in the order in which they were written."""

NewTracker = Callable[[Path], Tracker]


def tensorboard(directory: Path) -> TensorBoardTracker:
    return TensorBoardTracker(directory)


def mlflow(directory: Path) -> MlflowTracker:
    return MlflowTracker("mine", tracking_uri=f"file:{directory}")


def wandb(directory: Path) -> WandbTracker:
    directory.mkdir(exist_ok=True)
    return WandbTracker("s:train:0", directory=directory)


def read_tensorboard(directory: Path) -> Values:
    found: Values = {}
    for path in sorted(directory.glob("*tfevents*"), key=lambda path: path.stat().st_mtime_ns):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


def read_mlflow(directory: Path) -> Values:
    """Reads the files of MLflow's store: a line "time value step" for each value."""
    [metrics] = directory.glob("*/*/metrics")
    lines = {path.relative_to(metrics).as_posix(): path.read_text() for path in metrics.rglob("*") if path.is_file()}
    rows = {name: [line.split() for line in text.splitlines()] for name, text in lines.items()}
    return {name: [(int(step), float(value)) for _, value, step in each] for name, each in rows.items()}


def read_wandb(directory: Path) -> Values:
    found: Values = {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        for row in wandb_rows(path):
            for name, value in row.items():
                if not name.startswith("_") and name != "step":
                    found.setdefault(name, []).append((int(row["step"]), value))
    return found


def wandb_rows(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a run's file, as soon as W&B's process, which writes it, has ended the run."""
    deadline = time.monotonic() + 20
    while True:
        records = list(wandb_records(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return [wandb_row(record) for record in records if record.history.item]
        assert time.monotonic() < deadline, f"{path} does not end"
        time.sleep(0.05)


def wandb_row(record: Record) -> dict[str, float]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}


def wandb_records(content: bytes) -> Iterator[Record]:
    """Yields the records of a file: in blocks of 32 KiB, as in LevelDB's log."""
    position, record, head = 7, b"", struct.Struct("<IHB")
    while position + head.size <= len(content):
        if (left := -position % (32 << 10)) and left < head.size:
            position += left
            continue
        _, num_bytes, kind = head.unpack_from(content, position)
        position += head.size
        record += content[position : position + num_bytes]
        position += num_bytes
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


TRACKERS = {
    "tensorboard": (tensorboard, read_tensorboard),
    "mlflow": (mlflow, read_mlflow),
    "wandb": (wandb, read_wandb),
}
each_tracker = pytest.mark.parametrize(("new", "read"), TRACKERS.values(), ids=TRACKERS.keys())
exact_after_crashes = pytest.mark.parametrize(("new", "read"), [TRACKERS["tensorboard"], TRACKERS["mlflow"]])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # The store in files needs nothing else; a database needs the whole of MLflow.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture(scope="module")
def service(shared_server: LiveServer) -> Iterator[ServiceClient]:
    with ServiceClient(shared_server.url, "tml-tracker-tests") as client:
        yield client


@pytest.fixture
def rest(service: ServiceClient) -> RestClient:
    return service.create_rest_client()


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=3)


def train(rest: RestClient, client: TrainingClient, num_steps: int, first: int = 1) -> list[float]:
    losses = []
    for _ in range(num_steps):
        passed = client.forward_backward(DATA, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-2)).result(60)
        losses.append(passed.result(60).metrics["loss:sum"])
    assert rest.get_metrics(client.model_id).result().training.steps[-1:] == [first + num_steps - 1]
    return losses


def close_to(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in values]


@each_tracker
def test_a_training_loop_writes_its_metrics(tmp_path: Path, new: NewTracker, read: Callable[[Path], Values]) -> None:
    tracker = new(tmp_path / "runs")
    for step in range(3):
        tracker.log({"loss:sum": 4.0 - step, "kl": float("nan")}, step)
    tracker.close()
    assert read(tmp_path / "runs") == {"loss:sum": [(0, 4.0), (1, 3.0), (2, 2.0)]}


@each_tracker
def test_a_follower_copies_a_run_and_continues_after_a_restart_without_doubles(
    client: TrainingClient, rest: RestClient, tmp_path: Path, new: NewTracker, read: Callable[[Path], Values]
) -> None:
    runs, cursor = tmp_path / "runs", tmp_path / "cursor"

    def follow() -> int:
        tracker = new(runs)
        num_new = RunFollower(rest, client.model_id, tracker, cursor).update()
        tracker.close()
        return num_new

    losses = train(rest, client, 2)
    client.log({"reward": 0.5}).result(60)
    assert follow() == 3 and follow() == 0
    losses += train(rest, client, 2, first=3)
    client.log({"reward": 0.75}).result(60)
    client.log({"kl": 0.125}, step=2).result(60)  # later, for a step that was copied
    assert follow() == 4
    found = read(runs)
    assert found["train/loss:sum"] == close_to(list(enumerate(losses, start=1)))
    assert found["reward"] == [(2, 0.5), (4, 0.75)] and found["kl"] == [(2, 0.125)]
    assert [step for step, _ in found["train/tokens_per_second"]] == [1, 2, 3, 4]


@exact_after_crashes
def test_a_follower_that_died_before_it_noted_what_it_wrote_writes_nothing_twice(
    client: TrainingClient, rest: RestClient, tmp_path: Path, new: NewTracker, read: Callable[[Path], Values]
) -> None:
    train(rest, client, 3)
    for _ in range(2):
        tracker = new(tmp_path / "runs")
        assert RunFollower(rest, client.model_id, tracker).update() == 3, "without a cursor it copies all again"
        tracker.close()
    assert [step for step, _ in read(tmp_path / "runs")["train/loss:sum"]] == [1, 2, 3]


def test_a_long_history_is_copied_page_by_page_and_its_cursor_stays_small(
    client: TrainingClient, rest: RestClient, tmp_path: Path
) -> None:
    for logged in [client.log({"reward": float(step)}, step=step) for step in range(450)]:
        logged.result(60)
    tracker, cursor = tensorboard(tmp_path / "runs"), tmp_path / "cursor"
    assert RunFollower(rest, client.model_id, tracker, cursor).update() == 450
    client.log({"reward": 450.0}, step=450).result(60)
    assert RunFollower(rest, client.model_id, tracker, cursor).update() == 1
    tracker.close()
    assert read_tensorboard(tmp_path / "runs")["reward"] == [(step, float(step)) for step in range(451)]
    assert len(json.loads(cursor.read_text())["logged"]["copied"]) == 51


def test_following_ends_when_nothing_new_appears(client: TrainingClient, rest: RestClient, tmp_path: Path) -> None:
    train(rest, client, 1)
    tracker = tensorboard(tmp_path)
    RunFollower(rest, client.model_id, tracker).follow(poll_seconds=0.05, idle_seconds=0.2)
    tracker.close()
    assert len(read_tensorboard(tmp_path)["train/loss:sum"]) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"run": "other", "training": {}, "logged": {}}', '{"run": "mine"}'])
def test_a_file_that_is_no_cursor_of_the_run_is_refused(rest: RestClient, tmp_path: Path, content: str) -> None:
    (tmp_path / "cursor").write_text(content)
    with pytest.raises(ValueError, match=r"does not belong to a follower of mine: .*: name another file"):
        RunFollower(rest, "mine", tensorboard(tmp_path / "runs"), tmp_path / "cursor")


def test_another_clients_run_cannot_be_followed(
    shared_server: LiveServer, client: TrainingClient, tmp_path: Path
) -> None:
    with ServiceClient(shared_server.url, "tml-tracker-other") as other, pytest.raises(trainhouse.NotFoundError):
        RunFollower(other.create_rest_client(), client.model_id, tensorboard(tmp_path)).update()


@pytest.mark.parametrize("name", ["it's", 'say "go"'])
def test_mlflow_finds_a_run_by_a_name_with_quotes(tmp_path: Path, name: str) -> None:
    ids = {MlflowTracker(name, tracking_uri=f"file:{tmp_path}").run_id for _ in range(2)}
    assert len(ids) == 1
    with pytest.raises(ValueError, match="leave out one kind of quotes"):
        MlflowTracker("'\"", tracking_uri=f"file:{tmp_path}")
