"""Base models at URLs: each version is downloaded once, whole or not at all, by one process at a time."""

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from trainhouse.server.cli import commands
from trainhouse.server.config.option_values import ConfigError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.state_lock import StartError
from trainhouse.server.serving.base_models import download_models
from trainhouse.tests.server.s3 import BUCKET, S3, s3_server
from trainhouse.tests.tiny import tiny_model
from trainhouse.workers.models import model_cache
from trainhouse.workers.models.model_cache import ModelCache, ModelUnavailableError
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.ranks import Ranks
from trainhouse.workers.worker.worker import Worker

from ..credentialed_worker import CREDENTIALED, save_environment

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model-1.safetensors": b"one" * 999,
    "model-2.safetensors": b"2",
}
BRING = "import sys; from trainhouse.workers.models.model_cache import *; c = ModelCache(sys.argv[2]); "
BRING += "print(c.fetch(c.newest(sys.argv[1]), print))"


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Retries without waiting."""
    monkeypatch.setattr(model_cache, "_PAUSES_SECONDS", (0.0, 0.0))
    server.requests.clear()
    yield server
    server.fails = lambda request: False


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """Returns a prefix that only this test uses, with FILES."""
    url = f"s3://{BUCKET}/{request.node.name.partition('[')[0]}"
    for name, content in FILES.items():
        put(url, name, content)
    return url


def put(url: str, name: str, content: bytes) -> None:
    fsspec.filesystem("s3").pipe_file(f"{url}/{name}", content)


def bring(cache: ModelCache, url: str) -> Path:
    return cache.fetch(cache.newest(url), lambda words: None)


def read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def fetched(s3: S3) -> Counter[str]:
    """Counts how often each file was read."""
    paths = [request.removeprefix("GET ") for request in s3.requests if request.startswith("GET ")]
    return Counter(name for path in paths if (name := path.rpartition("/")[2]) in FILES)


def start(url: str, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BRING, url, str(root)], stdout=subprocess.PIPE, text=True)


def test_model_is_downloaded_once_and_logged(s3: S3, url: str, tmp_path: Path) -> None:
    said: list[str] = []
    cache = ModelCache(tmp_path)
    here = cache.fetch(cache.newest(url), said.append)
    assert read(here) == FILES and fetched(s3) == dict.fromkeys(FILES, 1)
    assert said[0].startswith(f"downloading {url} (4 files, 0 MB) to {here}") and "downloaded in" in said[1]
    s3.requests.clear()
    assert bring(ModelCache(tmp_path), f"{url}/") == here, "a slash at the end means the same"
    assert len(said) == 2 and not fetched(s3)


def test_changed_model_is_downloaded_and_the_old_copy_stays(s3: S3, url: str, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    before = bring(cache, url)
    put(url, "model-2.safetensors", b"3")  # as long as before
    after = bring(cache, url)
    assert after != before and read(before) == FILES and read(after) == FILES | {"model-2.safetensors": b"3"}


def test_only_files_that_are_loaded_are_downloaded(s3: S3, url: str, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "original/config.json", "../outside.json", "a\\b.json"):
        put(url, name, b"{}")
    cache = ModelCache(tmp_path / "cache")
    assert set(read(bring(cache, url))) == {*FILES, "a\\b.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    small = cache.fetch(cache.newest(url), print, weights=False)
    assert set(read(small)) == {"config.json", "tokenizer.json", "a\\b.json"}


def test_killed_download_leaves_no_model_and_is_resumed(s3: S3, url: str, tmp_path: Path) -> None:
    s3.fails = lambda request: request.startswith("GET") and request.endswith("model-1.safetensors")
    process = start(url, tmp_path)
    deadline = time.monotonic() + 60
    while not (set(FILES) - {"model-1.safetensors"}).issubset(path.name for path in tmp_path.rglob("*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache = ModelCache(tmp_path)
    (directory,) = tmp_path.iterdir()
    assert all(path.name.startswith(".") for path in directory.iterdir()), "no file has its final name"
    s3.fails = lambda request: False
    s3.requests.clear()
    assert read(bring(cache, url)) == FILES and fetched(s3) == {"model-1.safetensors": 1}


def test_two_concurrent_processes_download_once(s3: S3, url: str, tmp_path: Path) -> None:
    processes = [start(url, tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert sorted(map(len, said)) == [1, 3], "only one of them logs a download"
    assert said[0][-1] == said[1][-1] and read(Path(said[0][-1])) == FILES
    assert fetched(s3) == dict.fromkeys(FILES, 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"short", "expected 2997 bytes of model-1.safetensors, but received 5"), (b"two" * 999, "have changed")],
)
def test_model_that_changes_during_download_is_refused(
    s3: S3, url: str, tmp_path: Path, content: bytes, reason: str
) -> None:
    def change(request: str) -> bool:
        if request.startswith("GET") and request.endswith("model-1.safetensors"):
            put(url, "model-1.safetensors", content)
        return False

    cache = ModelCache(tmp_path)
    s3.fails = change
    with pytest.raises(ModelUnavailableError, match=reason):
        bring(cache, url)
    s3.fails = lambda request: False
    assert read(bring(cache, url)) == FILES | {"model-1.safetensors": content}
    put(url, "model-1.safetensors", FILES["model-1.safetensors"])
    assert read(bring(cache, url)) == FILES, "no file of the mixture is left"


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        ("s3://no-bucket/m", r"s3://no-bucket/m: there is no such bucket or prefix \(.*\): name one that exists"),
        (f"s3://{BUCKET}/none", "there is no such bucket or prefix"),
        (f"s3://{BUCKET}/deep", r"there is no config.json \(but inner\): name the prefix right above"),
        (f"s3://{BUCKET}/bare", "there are no .safetensors weights"),
    ],
)
def test_missing_model_is_refused_without_a_retry(s3: S3, at: str, reason: str, tmp_path: Path) -> None:
    put(f"s3://{BUCKET}/deep/inner", "config.json", b"{}")
    put(f"s3://{BUCKET}/bare", "config.json", b"{}")
    s3.requests.clear()
    with pytest.raises(ModelUnavailableError, match=reason):
        ModelCache(tmp_path).newest(at)
    assert len(s3.requests) <= 2, "without a retry"


def test_missing_credentials_are_named(s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ModelUnavailableError, match=f"{url}: access is refused .*give credentials .*AWS_ACCESS_KEY_ID"):
        ModelCache(tmp_path).newest(url)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_full_disk_is_refused_before_the_download(
    s3: S3, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type(shutil.disk_usage(tmp_path))(1 << 30, (1 << 30) - 2997, 2997)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(
        ModelUnavailableError, match=r"it takes 0 MB, but .* has only 0 MB free: free some space, or name another"
    ):
        bring(ModelCache(tmp_path), url)
    assert not fetched(s3)


def test_last_copy_is_served_while_the_url_is_unreachable(
    s3: S3, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModelCache(tmp_path)
    here = bring(cache, url)
    s3.fails = lambda request: True
    with caplog.at_level(logging.WARNING):
        assert bring(cache, url) == here
    assert "serving the copy downloaded before" in caplog.text
    with pytest.raises(ModelUnavailableError, match=url):
        ModelCache(tmp_path / "other").newest(url)


def test_rank_on_another_machine_refuses_a_changed_model(s3: S3, url: str, tmp_path: Path) -> None:
    origin = ModelCache(tmp_path / "here").newest(url)
    put(url, "model-2.safetensors", b"3")
    with pytest.raises(ModelUnavailableError, match="have changed since the version to load was chosen"):
        ModelCache(tmp_path / "there").fetch(origin, print)
    assert read(bring(ModelCache(tmp_path / "there"), url))["model-2.safetensors"] == b"3"


def test_plan_reads_only_config_json(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = upload_model(tmp_path, "planned")
    s3.requests.clear()
    for source in (at, f"{at}/config.json"):
        assert commands.main(["plan", f"--base-model=tiny={source}", "--parallel=tp=2"]) == 0
        assert "tiny (qwen3)" in capsys.readouterr().out
    read = {request.partition(" ")[2].rpartition("/")[2] for request in s3.requests}
    assert read == {"config.json"}
    assert commands.main(["plan", f"--base-model=tiny=s3://{BUCKET}/none"]) == 1
    assert "there is no such bucket or prefix" in capsys.readouterr().err


def test_server_does_not_start_without_its_base_model(s3: S3, tmp_path: Path) -> None:
    config = ServerConfig.of(base_models=(ServedModel("tiny", f"s3://{BUCKET}/none"),), model_cache=tmp_path)
    with pytest.raises(StartError, match=f"s3://{BUCKET}/none: there is no such bucket or prefix"):
        asyncio.run(download_models(config, print))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://user:secret@bucket/m", "has a password in its URL"),
        ("nowhere://bucket/m", "fsspec does not support nowhere://"),
    ],
)
def test_bad_model_url_is_refused_with_the_configuration(source: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        ServerConfig.of(base_models=(ServedModel("tiny", source),))
    assert "secret" not in str(refused.value)


def test_worker_on_another_machine_downloads_the_weights(s3: S3, tmp_path: Path) -> None:
    config = remote_rank_config(s3, tmp_path)
    assert Worker(config).info().vocab_size == 512
    assert weights_fetched(s3) == 1
    s3.fails = lambda request: True
    assert Worker(config).info().vocab_size == 512, "the URL is not read"


@pytest.mark.full
def test_the_ranks_of_a_layout_on_another_machine_download_once(s3: S3, tmp_path: Path) -> None:
    spec, config = ParallelSpec(tp=2), remote_rank_config(s3, tmp_path)
    save_environment(config)
    configs = tuple(replace(config, parallel=spec, rank=rank) for rank in range(2))

    async def architecture() -> str:
        ranks = Ranks(LocalPool(PoolSpec(CREDENTIALED, configs)), spec)
        try:
            await ranks.start()
            return (await ranks.call("info", hang_seconds=60)).architecture
        finally:
            await ranks.close()

    assert asyncio.run(architecture()) == "Qwen3ForCausalLM"
    assert weights_fetched(s3) == 1


def remote_rank_config(s3: S3, tmp_path: Path) -> WorkerConfig:
    """Returns the config of a rank on another machine; the server's machine has all but the weights."""
    at = upload_model(tmp_path, "elsewhere")
    s3.requests.clear()
    config = ServerConfig.of(
        base_models=(ServedModel("tiny", at),), model_cache=tmp_path / "here", pool="ray", threads=1, device="cpu"
    )
    here = asyncio.run(download_models(config, lambda words: None))
    (model,) = here.models.base_models
    assert Path(model.source, "config.json").is_file() and not list(Path(model.source).glob("*.safetensors"))
    assert weights_fetched(s3) == 0
    return replace(here.worker_config(model), model_cache=str(tmp_path / "there"), shared_directories=())


def weights_fetched(s3: S3) -> int:
    return sum(request.startswith("GET") and request.endswith(".safetensors") for request in s3.requests)


def upload_model(tmp_path: Path, name: str) -> str:
    model, at = tiny_model("qwen3", tmp_path / "model"), f"s3://{BUCKET}/{name}"
    for path in model.iterdir():
        put(at, path.name, path.read_bytes())
    return at
