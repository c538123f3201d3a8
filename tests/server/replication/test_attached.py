"""Servers that attach to kept workers: the knobs that they take over, and the differences that they refuse."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from trainhouse.server.cli.commands import main, workers_help
from trainhouse.server.config.knob_values import ConfigError
from trainhouse.server.config.server_config import ServerConfig, worker_knobs
from trainhouse.server.replication import attach as attached
from trainhouse.server.replication.attach import adopt_workers_config, dispatch_config, knobs_of_workers
from trainhouse.server.replication.state_lock import StartError
from trainhouse.workers.pools.base import PlacementError
from trainhouse.workers.pools.remote.secure_channel import read_secret
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import RoleGroup, ServedModel
from trainhouse.workers.scheduler.pool_factory import groups_of, pool_factory_of
from trainhouse.workers.scheduler.worker_daemon import WorkerDaemon

pytestmark = pytest.mark.anyio

MODELS = (ServedModel("tiny/a", "a/on-their-machine"), ServedModel("tiny/b", "b"))
SECRET = 40 * "geheim"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(SECRET)
    return file


@asynccontextmanager
async def kept_workers(
    secret_file: Path, port: int = 0, unknown: Mapping[str, object] | None = None, **knobs: Any
) -> AsyncIterator[str]:
    """Listens as workers with these knobs and with `unknown` ones, and yields the address.

    Clients can only request the description; there are no ranks.
    """
    config = ServerConfig.of(base_models=knobs.pop("base_models", MODELS), **knobs)
    keeper = WorkerDaemon({}, knobs_of_workers(config) | (unknown or {}), read_secret(secret_file))
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.setblocking(False)
        receiving = asyncio.create_task(keeper.serve(listener))
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        receiving.cancel()
        await asyncio.wait({receiving})


async def test_a_server_takes_over_the_knobs_of_its_workers(secret_file: Path) -> None:
    of_samplers = {"sampler_workers": 1, "sampler_parallel": ParallelSpec(tp=2)}
    shard = ("layers.*.self_attn.*=replicate",)
    worker_options = {
        "parallel": ParallelSpec(tp=2),
        "shard": shard,
        "adapter_slots": 3,
        "hang_seconds": 7.0,
    } | of_samplers
    worker_options["role_groups"] = (RoleGroup(("critic",)),)
    async with kept_workers(secret_file, **worker_options) as address:
        given = ServerConfig.of(workers=address, workers_secret_file=secret_file, adapter_slots=3, port=1)
        config, _ = await adopt_workers_config(given)
        assert (config.models.base_models, config.ranks.parallel, config.memory.adapter_slots) == (
            MODELS,
            ParallelSpec(tp=2),
            3,
        )
        assert config.ranks.role_groups == (RoleGroup(("critic",)),)
        assert (config.sampling.sampler_workers, config.sampling.sampler_parallel, config.network.port) == (
            1,
            ParallelSpec(tp=2),
            1,
        )
        assert config.worker_config(config.models.base_models[0]).parallel.replicated == ("self_attn",)
        assert config.ranks.hang_seconds == given.ranks.hang_seconds, "this timeout is the server's own"
        elsewhere = (ServedModel("tiny/a", "a/on-this-machine"), MODELS[1])
        config, _ = await adopt_workers_config(
            ServerConfig.of(workers=address, workers_secret_file=secret_file, base_models=elsewhere)
        )
        assert config.models.base_models == elsewhere


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"parallel": ParallelSpec(tp=2)}, "--parallel is tp=2 here and fsdp=2 at the workers at 127.0.0.1:"),
        (
            {"sampler_workers": 1, "sampler_parallel": ParallelSpec(ep=2)},
            "--sampler-parallel is ep=2 here and tp=2 at the workers",
        ),
        (
            {"shard": ("layers.*.mlp.*_proj.*=replicate",)},
            "--shard is layers.*.mlp.*_proj.*=replicate here and layers.*.self_attn.*=replicate at the workers",
        ),
        (
            {"role_groups": (RoleGroup(("critic",), ParallelSpec(tp=2)), RoleGroup(("reference",)))},
            "--role-group is critic=tp=2, reference=single here and critic=single at the workers",
        ),
        ({"max_lora_rank": 8}, "--max-lora-rank is 8 here and 256 at the workers"),
        ({"base_models": MODELS[:1]}, "--base-model is tiny/a here and tiny/a, tiny/b at the workers"),
    ],
)
async def test_knobs_that_differ_from_the_workers_are_refused(
    knobs: dict[str, Any], reason: str, secret_file: Path
) -> None:
    of_samplers = {"sampler_workers": 1, "sampler_parallel": ParallelSpec(tp=2)}
    worker_options = {"parallel": ParallelSpec(fsdp=2), "shard": ("layers.*.self_attn.*=replicate",)} | of_samplers
    worker_options["role_groups"] = (RoleGroup(("critic",)),)
    async with kept_workers(secret_file, **worker_options) as address:
        with pytest.raises(StartError, match=re.escape(reason)):
            await adopt_workers_config(ServerConfig.of(workers=address, workers_secret_file=secret_file, **knobs))


async def test_a_wrong_secret_is_refused_and_never_shown(
    secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("anders" + SECRET)
    async with kept_workers(secret_file) as address:
        with pytest.raises(StartError, match="the secrets of the two sides differ") as refused:
            await adopt_workers_config(ServerConfig.of(workers=address, workers_secret_file=other))
    assert "geheim" not in caplog.text + str(refused.value)


@pytest.mark.parametrize("sampler", ["native", "vllm"])
@pytest.mark.parametrize("own_models", [(), (ServedModel("tiny/a", "here"), ServedModel("tiny/b", "here"))])
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ({"parallel": ParallelSpec(tp=2)}, "parallel tp=2 instead of fsdp=2:"),
        ({"parallel": ParallelSpec(fsdp=2), "dtype": "bfloat16"}, "dtype bfloat16 instead of auto:"),
        (
            {"parallel": ParallelSpec(fsdp=2), "base_models": (ServedModel("tiny/a", "other"), MODELS[1])},
            "base_models tiny/a=other, tiny/b=b instead of tiny/a=a/on-their-machine, tiny/b=b:",
        ),
        (
            {"parallel": ParallelSpec(fsdp=2), "role_groups": (RoleGroup(("critic",), ParallelSpec(tp=2)),)},
            "role_groups critic=tp=2 instead of none:",
        ),
        ({"parallel": ParallelSpec(fsdp=2)}, "tiny/a is not among them"),
    ],
    ids=["layout", "dtype", "model", "roles", "nothing"],
)
async def test_workers_restarted_with_other_knobs_are_not_attached(
    then: dict[str, Any], reason: str, own_models: tuple[ServedModel, ...], sampler: str, secret_file: Path
) -> None:
    async with kept_workers(secret_file, parallel=ParallelSpec(fsdp=2)) as address:
        given = ServerConfig.of(
            workers=address,
            workers_secret_file=secret_file,
            base_models=own_models,
            sampler=sampler,  # pyright: ignore[reportArgumentType]
            vllm_url="http://127.0.0.1:1,http://127.0.0.1:2" if sampler == "vllm" else None,
        )
        config, at = await adopt_workers_config(given)
    worker_options = dispatch_config(config, at, epoch=7)
    async with kept_workers(secret_file, port=int(address.rpartition(":")[2]), **then):
        pool = pool_factory_of(worker_options).new_pool("tiny/a", worker_options.models[0])
        with pytest.raises(PlacementError, match=re.escape(reason)):
            await pool.start()


async def test_workers_restarted_with_another_sampler_layout_are_not_attached(secret_file: Path) -> None:
    """Both layouts have the same number of ranks, and those would answer requests."""
    of_samplers = {"sampler_workers": 1, "sampler_parallel": ParallelSpec(tp=2)}
    async with kept_workers(secret_file, **of_samplers) as address:
        config, at = await adopt_workers_config(ServerConfig.of(workers=address, workers_secret_file=secret_file))
    worker_options = dispatch_config(config, at, epoch=7)
    [_, (name, sampler), *_] = groups_of(worker_options)
    assert (name, sampler.parallel) == ("tiny/a (sampler 1)", ParallelSpec(tp=2))
    then = {"sampler_workers": 1, "sampler_parallel": ParallelSpec(ep=2)}
    async with kept_workers(secret_file, port=int(address.rpartition(":")[2]), **then):
        with pytest.raises(PlacementError, match="sampler_parallel ep=2 instead of tp=2:"):
            await pool_factory_of(worker_options).new_pool(name, sampler).start()


async def test_unknown_knobs_of_the_workers_are_refused(secret_file: Path) -> None:
    async with kept_workers(secret_file, unknown={"adapter_colour": "blue"}) as address:
        with pytest.raises(StartError, match=r"have adapter_colour, which this trainhouse .* does not support: run"):
            await adopt_workers_config(ServerConfig.of(workers=address, workers_secret_file=secret_file))


async def test_missing_workers_are_refused_after_a_wait(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "_LOOK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    config = ServerConfig.of(workers=address, workers_secret_file=secret_file)
    monkeypatch.setattr(attached, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(StartError, match=f"start them with `trainhouse workers --listen {address}`"):
        await adopt_workers_config(config)


def test_missing_and_wrong_flags_of_workers_are_refused(
    secret_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert main(arguments) != 0
        return capsys.readouterr().err

    short = tmp_path / "short"
    short.touch(0o600)
    short.write_text("geheim")
    own = ["workers", "--base-model=x/y"]
    assert "--base-model is not given" in refusal("workers")
    assert "--listen is not given: expected HOST:PORT" in refusal(*own)
    assert "--listen is 'everywhere': expected HOST:PORT" in refusal(*own, "--listen=everywhere")
    assert "--workers-secret-file is not given" in refusal(*own, "--listen=127.0.0.1:0")
    assert "has 6 bytes" in refusal(*own, "--listen=127.0.0.1:0", f"--workers-secret-file={short}")
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"--listen=127.0.0.1:{other.getsockname()[1]}"
        assert "choose another --listen" in refusal(*own, listen, f"--workers-secret-file={secret_file}")
    assert "workers needs workers_secret_file" in refusal("serve", "--workers=127.0.0.1:1")
    with pytest.raises(ConfigError, match="workers is 'nowhere': expected HOST:PORT"):
        ServerConfig.of(workers="nowhere", workers_secret_file=secret_file)


def test_the_help_of_workers_names_its_knobs() -> None:
    for knob in worker_knobs():
        assert knob.flag in workers_help()
    assert max(map(len, workers_help().splitlines())) <= 120
