"""Trackers write a run's metrics to TensorBoard, MLflow or Weights & Biases, in a training loop or from its history.

Each needs its package, from the extra of its name: `pip install 'trainhouse[tensorboard]'`.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from ..schemas.bounds import load_json
from ..schemas.history import MetricSeries
from .rest import RestClient

_PAGE_STEPS = 200
"""Steps that a follower reads at a time."""

_MLFLOW_BATCH = 1000
_MLFLOW_NAMES = re.compile(r"[^\w\-. :/]")
_WANDB_IDS = re.compile(r"[^\w\-.]")


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Adds metrics of a step; those that are not finite are left out.

        Args:
            at: when they were measured, in seconds since 1970; None means now.
        """
        ...

    def flush(self) -> None:
        """Returns when what was logged is stored, as far as the tracker knows."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes event files to a directory. A value whose tag, step and time its files have already is left out."""

    def __init__(self, directory: str | Path) -> None:
        from tensorboard.summary import Writer

        self._known = _known_events(Path(directory))
        self._writer = Writer(str(directory))

    def log(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        at = time.time() if at is None else at
        for name, value in _finite(metrics).items():
            if (name, step, at) not in self._known:
                self._writer.add_scalar(name, value, step, wall_time=at)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MlflowTracker:
    """Writes to a run of MLflow, which is found again by its name. A value whose metric, step and time the run has
    already is left out.

    run_id: MLflow's id of the run.
    """

    def __init__(self, name: str, experiment: str = "trainhouse", tracking_uri: str | None = None) -> None:
        """Opens the run, or creates it, and its experiment.

        Args:
            name: without one of the two kinds of quotes, since MLflow could not find it.
            tracking_uri: as MLflow's; None takes MLFLOW_TRACKING_URI, or MLflow's default.
        Raises:
            ValueError: the name has both kinds of quotes.
        """
        if '"' in name and "'" in name:
            raise ValueError(f"{name!r} cannot be the name of a run: leave out one kind of quotes")
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(tracking_uri), Metric
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        quote = "'" if '"' in name else '"'
        runs = self._client.search_runs([experiment_id], f"attributes.run_name = {quote}{name}{quote}", max_results=1)
        run = runs[0] if runs else self._client.create_run(experiment_id, run_name=name)
        self.run_id: str = run.info.run_id
        self._known: dict[str, set[tuple[int, int]]] = {}
        self._is_continued = bool(runs)
        self._client.update_run(self.run_id, status="RUNNING")

    def log(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        milliseconds = round(1000 * (time.time() if at is None else at))
        named = {_MLFLOW_NAMES.sub("_", name): value for name, value in _finite(metrics).items()}
        values = [
            self._metric(name, value, milliseconds, step)
            for name, value in named.items()
            if (step, milliseconds) not in self._known_values(name)
        ]
        for start in range(0, len(values), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, values[start : start + _MLFLOW_BATCH], synchronous=True)

    def _known_values(self, name: str) -> set[tuple[int, int]]:
        """Returns the step and time of each value that the run had when it was opened."""
        if name not in self._known:
            history = self._client.get_metric_history(self.run_id, name) if self._is_continued else ()
            self._known[name] = {(value.step, value.timestamp) for value in history}
        return self._known[name]

    def flush(self) -> None:
        """Does nothing: what `log` wrote is stored."""

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


class WandbTracker:
    """Writes to a run of Weights & Biases, which continues if the project has it.

    The steps of ours need not grow, so they are a metric, `step`, against which W&B draws the others.
    """

    def __init__(self, name: str, project: str = "trainhouse", directory: str | Path | None = None) -> None:
        """Opens the run by its name, which is its id too. WANDB_MODE, WANDB_API_KEY, ... are W&B's own."""
        import wandb

        self._run = wandb.init(
            project=project,
            name=name,
            id=_WANDB_IDS.sub("-", name),
            resume="allow",
            dir=None if directory is None else str(directory),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int, at: float | None = None) -> None:
        timed = {} if at is None else {"_timestamp": at}
        self._run.log({**_finite(metrics), "step": step, **timed})

    def flush(self) -> None:
        """Does nothing: W&B's own process stores what was logged."""

    def close(self) -> None:
        self._run.finish()


@dataclass
class _Page:
    """The part of a series that is being copied. after: its cursor. copied: metrics that the tracker has, by row."""

    after: int = -1
    copied: dict[str, dict[str, float]] = field(default_factory=dict)


class RunFollower:
    """Copies the metrics of a training run from the server's history to a tracker, from any process.

    Those of optimizer steps get the prefix `train/`; those that the client has logged keep their names. What is logged
    later for one of the newest 200 steps is copied too.
    """

    def __init__(
        self, rest: RestClient, training_run_id: str, tracker: Tracker, cursor: str | Path | None = None
    ) -> None:
        """Starts at the beginning, or where an earlier follower with this cursor ended.

        Args:
            cursor: file that remembers what the tracker has; without it a restarted follower copies everything again.
        Raises:
            ValueError: the file is no cursor of this run.
        """
        self._rest = rest
        self._run_id = training_run_id
        self._tracker = tracker
        self._cursor = None if cursor is None else Path(cursor)
        self._training, self._logged = _Page(), _Page()
        if self._cursor is not None and self._cursor.exists():
            self._read_cursor(self._cursor)

    def update(self) -> int:
        """Copies what is new and returns the number of rows with new metrics.

        Raises:
            NotFoundError: the run does not exist for this API key; and the other errors of APIFuture.result.
        """
        num_new, has_more = 0, True
        while has_more:
            after, logged_after = self._training.after, self._logged.after
            found = self._rest.get_metrics(self._run_id, after, logged_after, limit=_PAGE_STEPS).result()
            new = self._copy(self._training, found.training, "train/") + self._copy(self._logged, found.logged, "")
            has_more = _turn(self._training, found.training) | _turn(self._logged, found.logged)
            if new or has_more:
                self._tracker.flush()
                self._write_cursor()
            num_new += new
        return num_new

    def follow(self, poll_seconds: float = 10.0, idle_seconds: float = math.inf) -> None:
        """Copies what the run does, until nothing new has appeared for `idle_seconds`."""
        last_at = time.monotonic()
        while True:
            if self.update():
                last_at = time.monotonic()
            if time.monotonic() - last_at >= idle_seconds:
                return
            time.sleep(min(poll_seconds, idle_seconds))

    def _copy(self, page: _Page, series: MetricSeries, prefix: str) -> int:
        num_new = 0
        for number, (step, at) in enumerate(zip(series.steps, series.times, strict=True)):
            values = ((name, column[number]) for name, column in series.metrics.items())
            # A step of training may occur again after load_weights; a step that was logged is one row.
            copied = page.copied.setdefault(f"{step} {at}" if prefix else f"{step}", {})
            new = {name: value for name, value in values if value is not None and copied.get(name) != value}
            if new:
                self._tracker.log({f"{prefix}{name}": value for name, value in new.items()}, step, at)
                copied.update(new)
                num_new += 1
        return num_new

    def _read_cursor(self, path: Path) -> None:
        try:
            read = load_json(path.read_text())
            if read["run"] != self._run_id:
                raise ValueError(f"it is of run {read['run']}")
            self._training, self._logged = _Page(**read["training"]), _Page(**read["logged"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"cursor {path} does not belong to a follower of {self._run_id}: {error}: name another file"
            raise ValueError(message) from None

    def _write_cursor(self) -> None:
        if self._cursor is None:
            return
        written = {"run": self._run_id, "training": asdict(self._training), "logged": asdict(self._logged)}
        aside = self._cursor.with_name(f"{self._cursor.name}.{os.getpid()}")
        aside.write_text(json.dumps(written))
        aside.replace(self._cursor)


def _turn(page: _Page, series: MetricSeries) -> bool:
    """Turns to the page after a full one; False if there is none."""
    if series.next is None:
        return False
    page.after, page.copied = series.next, {}
    return True


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _known_events(directory: Path) -> set[tuple[str, int, float]]:
    """Returns the tag, step and time of every value in the event files of a directory."""
    if not any(directory.glob("*tfevents*")):
        return set()
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return {
        (value.tag, event.step, event.wall_time)
        for path in directory.glob("*tfevents*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
