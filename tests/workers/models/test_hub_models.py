"""Base models at hf://: downloads continue in the middle of a file, and each file is compared with the hub's hash. The
hub is a local server (see tests.server.hub).
"""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainhouse.server.cli import commands
from trainhouse.tests.server.hub import Hub, hub_server
from trainhouse.tests.tiny import tiny_model
from trainhouse.workers.models import hub as hub_files
from trainhouse.workers.models import model_cache
from trainhouse.workers.models.model_cache import ModelCache, ModelUnavailableError

from .test_model_cache import FILES, bring, read

REPOSITORY = "alice/model"
URL = f"hf://{REPOSITORY}@main"
PIECE_BYTES = 500
BRING = f"""import sys
from trainhouse.workers.models import hub
from trainhouse.workers.models.model_cache import ModelCache
hub._PIECE_BYTES = {PIECE_BYTES}
cache = ModelCache(sys.argv[2])
cache.fetch(cache.newest(sys.argv[1]), print)
"""
WEIGHTS = "model-1.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Retries without waiting."""
    monkeypatch.setattr(model_cache, "_PAUSES_SECONDS", (0.0, 0.0))
    (tmp_path / "hub").mkdir()
    with hub_server(tmp_path / "hub") as running:
        running.create(REPOSITORY, is_private=True)
        for name, content in FILES.items():
            running.add(REPOSITORY, name, content)
        yield running


def read_pieces(hub: Hub, name: str) -> int:
    return sum(request.startswith("GET") and request.endswith(f"/resolve/main/{name}") for request in hub.requests)


def test_a_model_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    here = bring(ModelCache(tmp_path / "cache"), URL)
    assert read(here) == FILES and read_pieces(hub, WEIGHTS) == 1
    assert bring(ModelCache(tmp_path / "cache"), URL) == here and read_pieces(hub, WEIGHTS) == 1
    hub.add(REPOSITORY, "model-2.safetensors", b"3")  # as long as before
    after = bring(ModelCache(tmp_path / "cache"), URL)
    assert after != here and read(after)["model-2.safetensors"] == b"3" and read(here) == FILES


def test_a_directory_and_a_commit_can_be_named(hub: Hub, tmp_path: Path) -> None:
    for name, content in FILES.items():
        hub.add(REPOSITORY, f"inner/{name}", content + b" ")
    commit = hub.repositories[REPOSITORY].branches["main"]
    hub.add(REPOSITORY, "inner/config.json", b"changed")
    assert read(bring(ModelCache(tmp_path / "cache"), f"hf://{REPOSITORY}@{commit}/inner"))["config.json"] == b"{} "


def test_a_killed_download_continues_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    may_continue, root = threading.Event(), tmp_path / "cache"
    hub.fails = lambda request: read_pieces(hub, WEIGHTS) > 3 and not may_continue.wait(60)
    process = subprocess.Popen([sys.executable, "-c", BRING, URL, str(root)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while read_pieces(hub, WEIGHTS) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    may_continue.set()
    (arrived,) = root.rglob(f".{WEIGHTS}")
    assert 0 < arrived.stat().st_size < len(FILES[WEIGHTS])
    (directory,) = root.iterdir()
    assert all(path.name.startswith(".") for path in directory.iterdir()), "no model has its final name"
    left = len(FILES[WEIGHTS]) - arrived.stat().st_size
    hub.sent.clear()
    assert read(bring(ModelCache(root), URL)) == FILES
    assert hub.sent[WEIGHTS] == left


def test_damaged_files_are_refused_and_downloaded_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (WEIGHTS, "tokenizer.json"):
        entry = hub.files(REPOSITORY)[name]
        path = hub.object_path(entry.sha256 or entry.oid)
        right = path.read_bytes()
        path.write_bytes(right[:-1] + b"?")
        with pytest.raises(ModelUnavailableError, match=f"{name} arrived with another hash than the hub reports"):
            bring(ModelCache(tmp_path / name), URL)
        path.write_bytes(right)
        assert read(bring(ModelCache(tmp_path / name), URL)) == FILES


def test_damage_in_what_arrived_before_a_crash_is_found(hub: Hub, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache")
    origin = cache.newest(URL)
    hub.fails = lambda request: request.endswith(WEIGHTS)
    with pytest.raises(ModelUnavailableError, match="the hub answered 507 no room"):
        cache.fetch(origin, print)
    hub.fails = lambda request: False
    (staging,) = (path for path in (tmp_path / "cache").rglob(".staging-*"))
    (staging / f".{WEIGHTS}").write_bytes(bytes(1000))
    with pytest.raises(ModelUnavailableError, match="another hash"):
        cache.fetch(origin, print)
    assert read(cache.fetch(origin, print)) == FILES


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("hf://alice/none@main", r"the hub does not have it, or not for this token \(404 Repository not found\)"),
        (f"hf://{REPOSITORY}@none", r"the hub does not have it, or not for this token \(404 Invalid rev id: none\)"),
        (f"hf://{REPOSITORY}@main/none", "main/none"),
    ],
)
def test_a_missing_model_is_refused_without_a_retry(hub: Hub, tmp_path: Path, url: str, reason: str) -> None:
    with pytest.raises(ModelUnavailableError, match=reason):
        ModelCache(tmp_path).newest(url)
    assert sum(request.startswith("GET /api/models") for request in hub.requests) <= 3


def test_a_refused_token_is_reported_with_the_remedy_and_not_shown(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_refused")
    with pytest.raises(ModelUnavailableError, match=r"the hub refuses access \(401 .*in HF_TOKEN") as refused:
        ModelCache(tmp_path).newest(URL)
    assert "hf_refused" not in str(refused.value)


def test_the_last_copy_is_served_while_the_hub_is_unreachable(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModelCache(tmp_path / "cache")
    here = bring(cache, URL)
    hub.fails = lambda request: True
    with caplog.at_level(logging.WARNING):
        assert bring(cache, URL) == here
    assert "serving the copy downloaded before" in caplog.text


def test_plan_reads_only_config_json(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPOSITORY, "config.json", (tiny_model("qwen3", tmp_path / "tiny") / "config.json").read_bytes())
    assert commands.main(["plan", f"--base-model=tiny={URL}", "--parallel=tp=2"]) == 0
    assert "tiny (qwen3)" in capsys.readouterr().out
    assert {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request} == {"config.json"}


def test_hashes_are_those_of_git_and_lfs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    git, lfs = (
        "ce013625030ba8dba906f756967f9e9ca394464a",
        "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
    )
    assert hub_files.has_hash(path, git) and hub_files.has_hash(path, lfs)
    path.write_bytes(b"hellO\n")
    assert not hub_files.has_hash(path, git) and not hub_files.has_hash(path, lfs)
