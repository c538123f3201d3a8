"""The workers that outlive the servers of a state directory: their id, and the former ways to have such workers."""

from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.cli.commands import main
from trainhouse.server.config.load import load_config
from trainhouse.server.config.option_values import ConfigError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.files.state_lock import StartError
from trainhouse.server.serving.server_process import kept_workers
from trainhouse.workers.protocol.worker_config import ServedModel

ON_RAY = {"pool": "ray", "ray_address": "127.0.0.1:6379"}


def config_of(state_dir: Path, **options: Any) -> ServerConfig:
    return ServerConfig.of(base_models=(ServedModel("a", "b"),), state_dir=state_dir, **ON_RAY, **options)


def test_servers_of_a_state_directory_have_the_same_workers(tmp_path: Path) -> None:
    first, second = (kept_workers(config_of(tmp_path, keep_workers_seconds=60.0), epoch) for epoch in (None, 7))
    assert first is not None and second is not None
    assert first.namespace == second.namespace and first.server != second.server
    assert (first.epoch, second.epoch, second.seconds) == (None, 7, 60.0)
    assert Path(first.id_file).read_text() == first.state_id


def test_a_server_that_keeps_no_workers_ends_those_that_are_kept(tmp_path: Path) -> None:
    kept = kept_workers(config_of(tmp_path, keep_workers_seconds=60.0), None)
    assert kept is not None and Path(kept.id_file).exists()
    assert kept_workers(config_of(tmp_path), None) is None
    assert not Path(kept.id_file).exists()  # on which they end
    again = kept_workers(config_of(tmp_path, keep_workers_seconds=60.0), None)
    assert again is not None and again.namespace != kept.namespace


def test_unusable_state_directory_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"workers\.id cannot be used: Not a directory"):
        kept_workers(config_of(tmp_path / "file", keep_workers_seconds=60.0), None)


def test_kept_workers_need_a_cluster_that_outlives_the_server(tmp_path: Path) -> None:
    flags = {"base_models": ["a=b"], "keep_workers_seconds": "60"}
    with pytest.raises(ConfigError, match="keep_workers_seconds has no effect with pool local"):
        load_config(flags, {}, None)
    with pytest.raises(ConfigError, match=r"needs ray_address.*ray start --head --port=6379` starts one"):
        load_config({**flags, "pool": "ray"}, {}, None)
    with pytest.raises(ConfigError, match="keep_workers_seconds is 2: give at least 10"):
        config_of(tmp_path, keep_workers_seconds=2.0)
    with pytest.raises(ConfigError, match="shared_devices turns: kept workers stay on their devices"):
        config_of(tmp_path, keep_workers_seconds=60.0, shared_devices="turns")


def test_former_ways_to_keep_workers_name_the_present_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: str) -> str:
        assert main(arguments) == 2
        return capsys.readouterr().err

    remedy = "--ray-address HOST:6379 --keep-workers-seconds 600`"
    assert remedy in refusal("workers", "--base-model=x/y", "--listen=127.0.0.1:0")
    assert remedy in refusal("serve", "--base-model=x/y", "--workers=127.0.0.1:1")
    assert remedy in refusal("serve", "--base-model=x/y", "--workers-secret-file=x")
    file = tmp_path / "server.toml"
    file.write_text('workers = "127.0.0.1:1"\n')
    for environment, given in (({"TRAINHOUSE_WORKERS": "127.0.0.1:1"}, None), ({}, file)):
        with pytest.raises(ConfigError, match="workers that outlive the server are on Ray"):
            load_config({"base_models": ["a=b"]}, environment, given)
