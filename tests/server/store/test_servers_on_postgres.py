"""Whole servers and the command line on PostgreSQL."""

import asyncio
import itertools
from pathlib import Path

import pytest
from sqlalchemy import make_url
from trainhouse.server.cli.commands import main
from trainhouse.server.store import DATABASE_NAME
from trainhouse.server.store import postgres as postgres_module
from trainhouse.workers.dispatch import WorkerDispatch

from ...postgres import Databases
from ..real import Run, batch, running_server, server_config

pytestmark = pytest.mark.anyio


async def test_training_continues_through_restarts_of_server_and_database(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    postgres: Databases,
    postgres_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, database_url=postgres_url)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        losses = await run.train(batch(), num_steps=1)
        postgres.cut_connections(postgres_url)
        losses += await run.train(batch(), num_steps=1)
        assert await run.do("save_weights", path="kept")
        first = await server.result(f"{run.model_id}:1")
    if postgres.server is not None:
        postgres.server.crash()
        postgres.server.start()
    async with running_server(config, dispatch) as server:
        assert await server.result(f"{run.model_id}:1") == first
        again = Run(server, run.model_id, run.session_id)
        again.numbers = itertools.count(next(run.numbers))
        training = asyncio.create_task(again.train(batch(), num_steps=2))
        if postgres.server is not None:
            await asyncio.to_thread(postgres.server.stop)
            await asyncio.to_thread(postgres.server.start)
        losses += await training
        assert losses == sorted(losses, reverse=True) and losses[3] < 0.9 * losses[0]
        assert [one.name for one in (await checkpoints_of(server, run))] == ["kept"]
    assert not (tmp_path / DATABASE_NAME).exists()
    assert str(make_url(postgres_url).password) not in caplog.text


async def test_a_server_survives_a_long_database_outage(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    postgres: Databases,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if postgres.server is None:
        pytest.skip("an external PostgreSQL is not stopped")
    monkeypatch.setattr(postgres_module, "_OUTAGE_SECONDS", 0.3)
    async with running_server(
        server_config(tiny_models["qwen3"], tmp_path, database_url=postgres_url), dispatch
    ) as server:
        run = await server.create_run()
        losses = await run.train(batch(), num_steps=1)
        await asyncio.to_thread(postgres.server.stop)
        try:
            refused = await server.post("create_session", {"sdk_version": "0"}, status=503)
        finally:
            await asyncio.to_thread(postgres.server.start)
        assert "out of reach" in refused["detail"] and str(make_url(postgres_url).password) not in refused["detail"]
        losses += await run.train(batch(), num_steps=1)
        assert losses[1] < losses[0]
        assert await server.create_session() != run.session_id


async def checkpoints_of(server, run: Run):
    record = await server.services.store.runs.get(run.model_id)
    return (await server.services.store.checkpoints.list_of_tenant(record.tenant_id, 0.0, 0, 10))[0]


def test_keys_of_a_database_are_created_listed_and_revoked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, postgres_url: str
) -> None:
    database_option = f"--database-url={postgres_url}"
    assert main(["keys", "create", "alice", database_option, f"--state-dir={tmp_path}"]) == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert "it is the first key: on this database made-up" in said.err
    monkeypatch.setenv("TRAINHOUSE_DATABASE_URL", postgres_url)
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed and key not in listed
    assert main(["keys", "revoke", "1"]) == 0
    assert main(["keys", "revoke", "1"]) == 1
    assert "there is no key" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_live_state_of_another_database_is_not_repaired(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, postgres_url: str
) -> None:
    weights = tmp_path / "live-3" / "ephemeral" / "one"
    weights.mkdir(parents=True)
    command = ["verify", "--repair", f"--state-dir={tmp_path}", f"--database-url={postgres_url}"]
    assert main(command) == 1
    assert "has live-3, but the database is at epoch 0: it belongs to another database" in capsys.readouterr().err
    assert weights.exists()
    (tmp_path / "live-3").rename(tmp_path / "live-0")
    assert main(command) == 0
    assert "ephemeral/one: left over: " in capsys.readouterr().out


def test_a_missing_database_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    database_option = f"--database-url=postgresql://me:geheim@/d?host={tmp_path}"
    serve = ["serve", f"--base-model=a={tiny_models['qwen3']}", f"--state-dir={tmp_path / 'state'}", "--port=0"]
    for command in (["keys", "list"], serve):
        assert main([*command, database_option]) == 1
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 1
        assert "postgresql+psycopg://me:***@/d cannot be used: connection" in said.err
