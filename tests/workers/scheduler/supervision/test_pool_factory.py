"""Tests which workers of an earlier server the next one may take over."""

from dataclasses import replace
from pathlib import Path

import pytest
import trainhouse
from trainhouse.workers.protocol.worker_config import DispatchConfig, ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.pool_factory import _fingerprint, _source_files

CONFIG = DispatchConfig((WorkerConfig(ServedModel("tiny", "/models/tiny")),), pool="ray")


def with_model(**changes: object) -> DispatchConfig:
    return replace(CONFIG, models=(replace(CONFIG.models[0], **changes),))


def test_kept_workers_are_the_same_for_a_server_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of cores and the directory for live state may differ."""
    before = _fingerprint(CONFIG)
    monkeypatch.setattr("trainhouse.workers.scheduler.supervision.pool_factory.num_cores", lambda: 24)
    assert _fingerprint(CONFIG) == before
    assert _fingerprint(with_model(shared_directories=("/state/live-7",))) == before


def test_kept_workers_with_other_options_are_others() -> None:
    others = [with_model(threads=3), with_model(dtype="bfloat16"), replace(CONFIG, ray_cpus_per_rank=2.0)]
    assert len({_fingerprint(config) for config in (CONFIG, *others)}) == 4


def test_kept_workers_of_other_code_are_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = Path(trainhouse.__path__[0])
    files = {file.relative_to(package).as_posix() for file in _source_files()}
    assert {"schemas/training.py", "workers/worker/worker.py", "workers/ops/cpu/kernels.c"} <= files
    (tmp_path / "workers").mkdir()
    monkeypatch.setattr("trainhouse.workers.scheduler.supervision.pool_factory._PACKAGE", tmp_path)
    found = set[str]()
    for line in ("VERSION = 1", "VERSION = 2"):
        (tmp_path / "workers" / "worker.py").write_text(line)
        found.add(_fingerprint(CONFIG))
    assert len(found) == 2
