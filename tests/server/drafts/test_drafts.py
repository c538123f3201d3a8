"""Draft models: creation, targets, vocabularies, checkpoints and recovery.

Most workers here compute nothing, but report the state of the draft in the metrics of a pass.
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from trainhouse.schemas.drafts import DRAFT_ID, BuildVocabMapRequest
from trainhouse.schemas.models import DraftConfig
from trainhouse.schemas.verbs import MODEL_ID
from trainhouse.server.cli.commands import main
from trainhouse.server.config.option_values import parse_role_group
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.drafts.vocabulary import build_vocabulary
from trainhouse.server.files.manifest import read_manifest, write_manifest
from trainhouse.server.journal.journal import Header, Journal, read_journal
from trainhouse.server.store import CheckpointKind
from trainhouse.workers.dispatch import WorkerDispatch

from ...workers.requests import repeatable
from ..noting import RESOLVED, with_noting_worker
from ..operations.test_pinned_checkpoints import delete, until
from ..real import (
    ALICE,
    BOB,
    MODEL,
    Run,
    Server,
    datum,
    running_server,
    sample_body,
    server_config,
    started_dispatch,
)
from ..runs.test_repeated_requests import OTHER, config_of

pytestmark = pytest.mark.anyio

EAGLE = {"algorithm": "eagle3", "seed": 5}
DATA = [{"model_input": [5, 6, 7], "loss_fn_inputs": {}}]
BARE = -1
"""Target seed of a draft whose target is the bare base model."""


@pytest.fixture
def config(tiny_models: dict[str, Path], tmp_path: Path) -> ServerConfig:
    return config_of(tiny_models, tmp_path / "state")


@pytest.fixture(scope="module")
async def dispatch(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    async with started_dispatch(
        config_of(tiny_models, tmp_path_factory.mktemp("unused")), with_noting_worker
    ) as dispatch:
        yield dispatch


@pytest.fixture
async def server(config: ServerConfig, dispatch: WorkerDispatch) -> AsyncIterator[Server]:
    async with running_server(config, dispatch) as running:
        yield running


async def create(server: Server, key: str = ALICE, base_model: str = MODEL, **fields: Any) -> Run:
    session_id = await server.create_session(key)
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model} | fields
    created = await server.result((await server.post("create_model", body, key))["request_id"], key)
    return Run(server, created["model_id"], session_id, key)


async def create_draft(server: Server, key: str = ALICE, target_path: str | None = None, **draft: Any) -> Run:
    return await create(server, key, model_role="draft", draft=EAGLE | draft, target_path=target_path)


async def create_policy(server: Server, seed: int, key: str = ALICE, base_model: str = MODEL, **fields: Any) -> Run:
    return await create(server, key, base_model, lora_config={"rank": 4, "seed": seed}, **fields)


async def saved_policy(server: Server, seed: int, name: str = "a", key: str = ALICE, base_model: str = MODEL) -> str:
    policy = await create_policy(server, seed, key, base_model)
    return (await policy.do("save_weights_for_sampler", path=name))["path"]


async def load(server: Server, path: str, key: str = ALICE) -> Run:
    """Creates a run from a checkpoint as SDKs do."""
    session_id = await server.create_session(key)
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    created = await server.result((await server.post("load_weights", body, key))["request_id"], key)
    return Run(server, created["model_id"], session_id, key)


async def draft_metrics(draft: Run, **fields: Any) -> dict[str, float]:
    answer = await draft.do("forward", **({"data": DATA, "loss_fn": "eagle3"} | fields))
    return {name.partition(":")[0]: value for name, value in answer["metrics"].items()}


async def info(run: Run) -> dict[str, Any]:
    return await run.server.post("get_info", {"model_id": run.model_id}, run.key)


async def kill_worker(server: Server) -> None:
    """Kills the worker; the next request notices it."""
    (pid,) = server.services.dispatch.pids(MODEL)
    os.kill(pid, signal.SIGKILL)


def pinned_names(server: Server, run: Run) -> list[str]:
    """Returns the names of the checkpoints that are pinned for the run."""
    directory = server.services.config.store.state_dir / "loaded" / run.model_id.replace(":", "_")
    return sorted(path.name for path in directory.glob("[0-9]*"))


async def publish(server: Server, path: str) -> None:
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    published = await server.clients[ALICE].post(f"training_runs/{run_id}/checkpoints/{kind}/{name}/publish")
    assert published.status_code == 204


async def remove(server: Server, path: str) -> None:
    run_id = path.removeprefix("tinker://").partition("/")[0]
    await delete(Run(server, run_id, ""), path)


# Creating


async def test_a_draft_is_recorded_with_the_config_that_the_workers_resolved(server: Server) -> None:
    target = await saved_policy(server, 3)
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "model_role": "draft"}
    body |= {"draft": EAGLE | {"capture_layers": [1, 2]}, "target_path": target.removeprefix("tinker://")}
    created = await server.result((await server.post("create_model", body))["request_id"])
    draft = Run(server, created["model_id"], session_id)
    wanted = {"training": "draft", **EAGLE, **RESOLVED, "capture_layers": [1, 2]}
    assert created == {"model_id": draft.model_id, "type": "create_model", "draft": wanted, "target_path": target}
    record = await server.services.store.runs.get(draft.model_id)
    assert record is not None and record.training == DraftConfig(**wanted)
    assert (record.role, record.target_path) == ("draft", target)
    described = await info(draft)
    assert (described["draft"], described["target_path"], described["model_role"]) == (wanted, target, "draft")
    assert (described["is_lora"], described["lora_rank"], described["target_modules"]) == (False, 0, [])
    types.GetInfoResponse.model_validate(described)
    listed = (await server.clients[ALICE].get(f"training_runs/{draft.model_id}")).json()
    assert (listed["is_lora"], listed.get("lora_rank"), listed["model_role"]) == (False, None, "draft")
    types.TrainingRun.model_validate(listed)


async def test_get_info_of_a_policy_has_no_draft_fields(server: Server) -> None:
    policy = await create_policy(server, 3)
    assert not {"draft", "target_path"} & (await info(policy)).keys()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_role": "draft"}, "model_role is 'draft' and there is no draft: send one"),
        ({"draft": EAGLE}, "draft is given and model_role is 'policy': send model_role 'draft'"),
        ({"draft": EAGLE, "model_role": "critic"}, "draft is given and model_role is 'critic'"),
        ({"target_path": "tinker://a/weights/b"}, "target_path is given and model_role is 'policy'"),
        ({"model_role": "draft", "draft": EAGLE, "lora_config": {"rank": 4}}, "leave out lora_config"),
        ({"model_role": "draft", "draft": EAGLE, "training": "full"}, "leave out training"),
        (
            {"model_role": "draft", "draft": EAGLE, "seed": 3},
            "seed 3 is only for full models: for a draft model set draft.seed",
        ),
        ({"model_role": "draft", "draft": {}}, "draft.algorithm is missing"),
        ({"model_role": "draft", "draft": {"algorithm": "some"}}, "draft.algorithm is 'some'"),
        ({"model_role": "draft", "draft": EAGLE | {"ttt_length": 7}}, "NewDraft has no ttt_length"),
        ({"model_role": "draft", "draft": EAGLE, "target_path": "nothing"}, "is not a checkpoint path"),
    ],
)
async def test_contradictory_fields_are_refused_and_not_journaled(server: Server, fields: dict, reason: str) -> None:
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL}
    assert reason in (await server.post("create_model", body | fields, status=400))["detail"]
    assert "error" not in await server.result((await server.post("create_model", body))["request_id"])


async def test_the_workers_refuse_options_of_another_algorithm(server: Server) -> None:
    body = {"session_id": await server.create_session(), "model_seq_id": 0, "base_model": MODEL, "model_role": "draft"}
    submitted = await server.post("create_model", body | {"draft": EAGLE | {"block_size": 4}})
    assert "block_size is of dflash" in (await server.result(submitted["request_id"]))["error"]


async def test_a_target_must_be_a_readable_policy_checkpoint_of_the_base_model(server: Server) -> None:
    critic = await create_policy(server, 3, model_role="critic")
    of_critic = (await critic.do("save_weights", path="a"))["path"]
    of_draft = (await (await create_draft(server)).do("save_weights", path="a"))["path"]
    elsewhere = await saved_policy(server, 3, base_model=OTHER)
    of_bob = await saved_policy(server, 3, key=BOB)
    body = {"model_seq_id": 0, "base_model": MODEL, "model_role": "draft", "draft": EAGLE}
    live = await create_draft(server)
    for path, reason, status in (
        (of_critic, "was saved by a critic: the target of a draft must be a policy's checkpoint", 400),
        (of_draft, "was saved by a draft: the target of a draft must be a policy's checkpoint", 400),
        (elsewhere, f"was trained on {OTHER}, and the draft is of {MODEL}", 400),
        (of_bob, "or it is not yours to read", 404),
        (elsewhere.replace("/a", "/none"), "there is no checkpoint", 404),
    ):
        session = {"session_id": await server.create_session(), "target_path": path}
        assert reason in (await server.post("create_model", body | session, status=status))["detail"]
        failed = await live.do("set_target", path=path)
        assert (reason in failed["error"], failed["category"]) == (True, "user")
    assert (await draft_metrics(live))["target_seed"] == BARE


async def test_another_tenants_policy_is_a_target_once_it_is_published(server: Server) -> None:
    state = (await (await create_policy(server, 7)).do("save_weights", path="a"))["path"]
    draft = await create_draft(server, BOB)
    assert "or it is not yours to read" in (await draft.do("set_target", path=state))["error"]
    await publish(server, state)
    assert (await draft.do("set_target", path=state))["target_path"] == state
    for each in (draft, await create_draft(server, BOB, target_path=state)):
        assert (await draft_metrics(each))["target_seed"] == 7


async def test_a_drawn_seed_is_journaled(server: Server) -> None:
    drafts = [await create_draft(server, seed=None) for _ in range(2)]
    (segment,) = (server.services.config.store.state_dir / "journal").glob("*.segment")
    drawn = {entry.header.run_id: dict(entry.header.drawn) for entry in read_journal(segment)}
    seeds = [(await info(draft))["draft"]["seed"] for draft in drafts]
    assert [drawn[draft.model_id] for draft in drafts] == [{"draft_seed": seed} for seed in seeds]
    assert seeds[0] != seeds[1]


async def test_the_next_server_runs_what_the_last_one_only_accepted(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as former:
        target, later = [await saved_policy(former, seed) for seed in (7, 8)]
        session_id = await former.create_session()
        tenant = await former.services.auth.authenticate(ALICE)
    run_id = f"{session_id}:train:0"
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "model_role": "draft"}
    body |= {"draft": {"algorithm": "dflash"}, "target_path": target}
    journal = Journal(config.store.state_dir / "journal", 1 << 20)
    header = Header("create_model", tenant.id, run_id, 0, f"{run_id}:0", drawn={"draft_seed": 9}, target_path=target)
    await journal.append(header, json.dumps(body).encode())
    loss = {"model_id": run_id, "seq_id": 1, "loss_fn": "dflash", "data": DATA}
    for seq_id in (1, 3):
        header = Header("forward_backward", tenant.id, run_id, seq_id, f"{run_id}:{seq_id}", drawn={"seed": 11})
        await journal.append(header, json.dumps(loss | {"seq_id": seq_id}).encode())
    header = Header("set_target", tenant.id, run_id, 2, f"{run_id}:2")
    await journal.append(header, json.dumps({"model_id": run_id, "seq_id": 2, "path": later}).encode())
    await journal.close()
    async with running_server(config, dispatch) as latter:
        created = await latter.result(f"{run_id}:0")
        assert (created["target_path"], created["draft"]["seed"]) == (target, 9)
        assert (await latter.result(f"{run_id}:2"))["target_path"] == later
        before, after = [(await latter.result(f"{run_id}:{seq_id}"))["metrics"] for seq_id in (1, 3)]
        assert before["seed:last"] == after["seed:last"] == 11
        assert (before["target_seed:last"], after["target_seed:last"]) == (7, 8)


# Targets


async def test_a_draft_moves_to_another_target_and_back_to_the_base_model(server: Server) -> None:
    policy = await create_policy(server, 3)
    path = (await policy.do("save_weights_for_sampler", path="a"))["path"]
    draft = await create_draft(server)
    assert (await draft_metrics(draft))["target_seed"] == BARE
    assert await draft.do("set_target", path=path) == {"target_path": path, "type": "set_target"}
    assert ((await draft_metrics(draft))["target_seed"], (await info(draft))["target_path"]) == (3, path)
    assert await draft.do("set_target", path=None) == {"type": "set_target"}
    assert (await draft_metrics(draft))["target_seed"] == BARE and "target_path" not in await info(draft)
    failed = await policy.do("set_target", path=path)
    assert failed["error"] == "a policy has no target: set_target is only for draft models"


async def test_a_repeated_set_target_is_applied_once(server: Server) -> None:
    first, second = [await saved_policy(server, seed) for seed in (3, 4)]
    draft = await create_draft(server)
    for path in (first, second):
        await draft.do("set_target", path=path)
    again = await draft.submit("set_target", seq_id=1, path=first)
    assert (await server.result(again["request_id"]))["target_path"] == first, "the first answer is repeated"
    assert (await draft_metrics(draft))["target_seed"] == 4


@pytest.mark.parametrize("dies", ["worker", "server"])
async def test_a_draft_is_rebuilt_with_its_newest_target(
    config: ServerConfig, dispatch: WorkerDispatch, dies: str
) -> None:
    """The checkpoints of the targets are deleted before."""
    async with running_server(config, dispatch) as server:
        paths = [await saved_policy(server, seed) for seed in (3, 4, 6)]
        draft = await create_draft(server, target_path=paths[0])
        for path in paths[1:]:
            await draft.do("set_target", path=path)
        assert "2-target" in pinned_names(server, draft)
        for path in paths:
            await remove(server, path)
        if dies == "worker":
            await kill_worker(server)
            assert ((await draft_metrics(draft))["target_seed"], (await info(draft))["target_path"]) == (6, paths[2])
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert ((await draft_metrics(draft))["target_seed"], (await info(draft))["target_path"]) == (6, paths[2])


async def test_a_target_is_pinned_as_long_as_snapshots_name_it(config: ServerConfig, dispatch: WorkerDispatch) -> None:
    async with running_server(config, dispatch) as server:
        paths = [await saved_policy(server, seed) for seed in (3, 4)]
        draft = await create_draft(server, target_path=paths[0])
        for path, seed, pinned in ((paths[0], 3, ["0-target"]), (paths[1], 4, None), (None, BARE, [])):
            if path != paths[0]:
                await draft.do("set_target", path=path)
            if path is not None:
                await remove(server, path)
            for _ in range(2):
                await server.services.runs.snapshot_old_runs(held_seconds=0)
                await kill_worker(server)
                assert (await draft_metrics(draft))["target_seed"] == seed
            if pinned is not None:
                assert pinned_names(server, draft) == pinned
            else:
                assert len(pinned_names(server, draft)) == 1
    async with running_server(config, dispatch) as server:
        draft.server = server
        assert (await draft_metrics(draft))["target_seed"] == BARE


async def test_a_target_stored_in_a_snapshot_of_an_earlier_version_is_kept(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    async with running_server(config, dispatch) as server:
        draft = await create_draft(server, target_path=await saved_policy(server, 3))
        await server.services.runs.snapshot_old_runs(held_seconds=0)
    state_dir, name = config.store.state_dir, draft.model_id.replace(":", "_")
    pinned = state_dir / "loaded" / name / "0-target"
    for snapshot in (state_dir / "snapshots" / name).iterdir():
        (snapshot / "target").mkdir()
        (snapshot / "target" / "training.json").write_bytes((pinned / "training.json").read_bytes())
        entries = {key: each for key, each in read_manifest(snapshot).items() if key not in ("target", "files")}
        (snapshot / "manifest.json").unlink()
        write_manifest(snapshot, entries)
    shutil.rmtree(pinned)
    for _ in range(2):
        async with running_server(config, dispatch) as server:
            draft.server = server
            assert (await draft_metrics(draft))["target_seed"] == 3
            await draft.do("forward_backward", data=DATA, loss_fn="eagle3")
            await server.services.runs.snapshot_old_runs(held_seconds=0)


@pytest.mark.slow
async def test_a_full_target_is_stored_once_and_survives_crashes(config: ServerConfig, tmp_path: Path) -> None:
    """The checkpoint is deleted before the workers die."""
    config = config.with_options(snapshot_steps=1)
    async with started_dispatch(config) as dispatch:
        async with running_server(config, dispatch) as server:
            policy = await create(server, training="full", seed=3)
            tensors = {"target_tokens": ([6, 7, 9], "int64"), "weights": ([1, 1, 1], "float32")}
            inputs = {name: {"data": data, "dtype": dtype, "shape": [3]} for name, (data, dtype) in tensors.items()}
            data = [{"model_input": [5, 6, 7], "loss_fn_inputs": inputs}]
            await policy.do("forward_backward", data=data, loss_fn="cross_entropy")
            await policy.do("optim_step", adam_params={"learning_rate": 0.1})
            path = (await policy.do("save_weights_for_sampler", path="a"))["path"]
            plain, draft = await create_draft(server), await create_draft(server, target_path=path)
            await remove(server, path)
            wanted = []
            for each in (plain, draft):
                for _ in range(3):
                    await each.do("forward_backward", data=DATA, loss_fn="eagle3")
                    await each.do("optim_step", adam_params={"learning_rate": 0.01})
                wanted.append((await draft_metrics(each))["loss"])
                await server.services.runs.snapshot_old_runs(held_seconds=0)
            assert wanted[0] != pytest.approx(wanted[1], rel=1e-3)
            sizes = [snapshot_bytes(config, each) for each in (plain, draft)]
            assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
            (pinned,) = (config.store.state_dir / "loaded" / draft.model_id.replace(":", "_")).iterdir()
            target_bytes = sum(file.stat().st_size for file in pinned.iterdir())
            assert target_bytes > 0.05 * sizes[1]
            await kill_worker(server)
            assert (await draft_metrics(draft))["loss"] == pytest.approx(wanted[1], rel=1e-4)
        copy = tmp_path / "copy"
        assert await asyncio.to_thread(main, ["backup", str(copy), f"--state-dir={config.store.state_dir}"]) == 0
        assert await asyncio.to_thread(main, ["verify", f"--state-dir={copy}"]) == 0
        async with running_server(config.with_options(state_dir=copy), dispatch) as server:
            draft.server = server
            await kill_worker(server)
            assert (await draft_metrics(draft))["loss"] == pytest.approx(wanted[1], rel=1e-4)
        shutil.rmtree(next((copy / "loaded").glob("*/*-target")))
        assert await asyncio.to_thread(main, ["verify", f"--state-dir={copy}"]) != 0


def snapshot_bytes(config: ServerConfig, run: Run) -> int:
    directory = config.store.state_dir / "snapshots" / run.model_id.replace(":", "_")
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@pytest.mark.parametrize("lost", ["2", "02"])
async def test_a_target_set_after_the_last_snapshot_is_set_again(
    config: ServerConfig, dispatch: WorkerDispatch, lost: str
) -> None:
    """Some of the repeated operations were submitted before the set_target."""
    async with running_server(config, dispatch) as server:
        first, second = [await saved_policy(server, seed) for seed in (3, 4)]
        draft = await create_draft(server, target_path=first)
        await draft.do("forward_backward", data=DATA, loss_fn="eagle3")
        await draft.do("set_target", path=second)
        await draft.do("forward_backward", data=DATA, loss_fn="eagle3")
        await draft.do("optim_step")
        snapshots = config.store.state_dir / "snapshots" / draft.model_id.replace(":", "_")
        await until(lambda: (snapshots / "2").exists())
    for snapshot in lost:
        if (snapshots / snapshot).exists():  # a later snapshot has replaced it
            (snapshots / snapshot / "draft.json").write_text("{}")
    async with running_server(config, dispatch) as server:
        draft.server = server
        found = await draft_metrics(draft)
        assert (found["target_seed"], found["steps"]) == (4, 1)


async def test_target_and_vocabulary_of_a_draft_survive_many_crashes(server: Server) -> None:
    path = await saved_policy(server, 3)
    draft = await create_draft(server, draft_vocab_size=2)
    await draft.do("build_vocab_map", tokens=[[9, 9, 7, 5, 7]])
    for target, seed in ((path, 3), (None, BARE), (path, 3)):
        await draft.do("set_target", path=target)
        await draft.do("forward_backward", data=DATA, loss_fn="eagle3")
        await draft.do("optim_step")
        await kill_worker(server)
        found = await draft_metrics(draft)
        assert (found["target_seed"], found["first_token"], found["tokens_said"]) == (seed, 7, 2)
    assert found["steps"] == 3


@pytest.mark.full
async def test_a_draft_with_a_smaller_vocabulary_trains_after_build_vocab_map(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Uses workers that compute.

    The draft cannot train without a vocabulary; the refused passes do no harm after one is built, even across restarts.
    """
    config = server_config(tiny_models["qwen3"], tmp_path)
    tokens = np.random.default_rng(1).integers(3, 60, 12).tolist()
    losses = {"data": [{"model_input": tokens, "loss_fn_inputs": {}}], "loss_fn": "eagle3"}
    async with started_dispatch(config) as dispatch:
        async with running_server(config, dispatch) as server:
            draft = await create_draft(server, draft_vocab_size=64)
            for what in ("forward", "forward_backward"):
                failed = await draft.do(what, **losses)
                assert failed["category"] == "user" and "call build_vocab_map with your corpus" in failed["error"]
        async with running_server(config, dispatch) as server:
            draft.server = server
            assert "was not chosen" in (await draft.do("forward_backward", **losses))["error"]
            assert "error" not in await draft.do("build_vocab_map", tokens=[tokens])
            assert "error" not in await draft.do("forward_backward", **losses)
        async with running_server(config, dispatch) as server:
            draft.server = server
            assert "error" not in await draft.optim_step()
            learned = repeatable((await draft.do("forward", **losses))["metrics"])
            saved = (await draft.do("save_weights", path="a"))["path"]
            await kill_worker(server)
            again = repeatable((await draft.do("forward", **losses))["metrics"])
            assert again == pytest.approx(learned, rel=1e-5)
            loaded = await load(server, saved)
            assert "error" not in await loaded.do("forward_backward", **losses)
            assert "error" not in await loaded.optim_step()


# Vocabularies


def naive_vocabulary(counts: dict[int, int], size: int, vocab_size: int) -> list[int]:
    by_frequency = sorted(range(vocab_size), key=lambda token: (-counts.get(token, 0), token))
    return sorted(by_frequency[:size])


@pytest.mark.parametrize("weighted", [False, True])
def test_the_vocabulary_is_the_most_frequent_tokens(weighted: bool) -> None:
    random = np.random.default_rng(1)
    for size in (1, 5, 13, 40):
        tokens = [random.integers(0, 20, length).tolist() for length in (30, 0, 7)]
        weights = [random.integers(0, 2, len(row)).tolist() for row in tokens] if weighted else None
        counted = list(chain(*tokens))
        if weights is not None:
            counted = [one for one, weight in zip(counted, chain(*weights), strict=True) if weight]
        counts = {token: counted.count(token) for token in set(counted)}
        wanted = naive_vocabulary(counts, size, 40)
        by_tokens = BuildVocabMapRequest(model_id="m", tokens=tokens, weights=weights)
        by_counts = BuildVocabMapRequest(model_id="m", counts=counts)
        for request in (by_tokens, by_counts):
            found = build_vocabulary(request, size, 40)
            assert (found.token_ids.tolist(), found.token_ids.dtype) == (wanted, np.int64)
            covered = sum(counts.get(token, 0) for token in wanted)
            described = found.described()
            assert (described.num_tokens, described.size) == (len(counted), size)
            assert described.covered == covered / len(counted)
            assert described.hash == hashlib.sha256(np.array(wanted, "<i8").tobytes()).hexdigest()[:16]
    if weighted:
        unweighted = BuildVocabMapRequest(model_id="m", tokens=tokens)
        assert build_vocabulary(unweighted, 5, 40).num_tokens != len(counted), "weights matter"


async def test_a_vocabulary_can_be_built_only_before_the_first_step(server: Server) -> None:
    draft = await create_draft(server, draft_vocab_size=3)
    answer = await draft.do("build_vocab_map", tokens=[[9, 9, 7], [4, 8]], weights=[[1, 0.5, 1], [0, 1]])
    wanted = hashlib.sha256(np.array([7, 8, 9], "<i8").tobytes()).hexdigest()[:16]
    assert answer == {"num_tokens": 4, "covered": 1.0, "size": 3, "hash": wanted, "type": "build_vocab_map"}
    answer = await draft.do("build_vocab_map", counts={"9": 5, "100": 3, "0": 2, "1": 2})
    assert (answer["num_tokens"], answer["covered"]) == (12, 10 / 12)
    found = await draft_metrics(draft)
    assert (found["first_token"], found["tokens_said"]) == (0, 3)
    await draft.do("optim_step")
    failed = await draft.do("build_vocab_map", counts={"9": 5})
    assert "before its first step" in failed["error"]
    policy = await create_policy(server, 3)
    failed = await policy.do("build_vocab_map", counts={"9": 5})
    assert failed["error"] == "a policy uses the full vocabulary: build_vocab_map is only for draft models"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "give either tokens or counts"),
        ({"tokens": [[1]], "counts": {"1": 1}}, "give either tokens or counts"),
        ({"tokens": [[1, 2]], "weights": [[1]]}, "weights and tokens have different lengths"),
        ({"counts": {"1": 1}, "weights": [[1]]}, "weights need tokens"),
        ({"tokens": [[-1]]}, "tokens.0.0 is -1"),
        ({"counts": {"1": -1}}, "counts.1 is -1"),
    ],
)
async def test_invalid_token_counts_are_refused(server: Server, fields: dict, reason: str) -> None:
    draft = await create_draft(server)
    assert reason in (await draft.submit("build_vocab_map", status=400, **fields))["detail"]
    assert "error" not in await draft.do("build_vocab_map", tokens=[[1]]), "the refused request used its seq_id"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": [[1, 512]]}, "token id 512 is not in the base model's vocabulary of 512"),
        ({"counts": {"1": 1, "900": 1}}, "token id 900 is not in the base model's vocabulary of 512"),
        ({"tokens": [[1, 2]], "weights": [[0, 0]]}, "no token was counted"),
        ({"tokens": []}, "no token was counted"),
        ({"counts": {}}, "no token was counted"),
    ],
)
async def test_unknown_tokens_and_empty_counts_fail(server: Server, fields: dict, reason: str) -> None:
    failed = await (await create_draft(server)).do("build_vocab_map", **fields)
    assert (reason in failed["error"], failed["category"]) == (True, "user")


# Losses


async def test_a_loss_config_with_strings_and_numbers_reaches_the_workers(server: Server) -> None:
    draft = await create_draft(server)
    config = {"objective": "lk_alpha", "ttt_length": 7}
    assert (await draft_metrics(draft, loss_fn_config=config))["objective_letters"] == 8
    output = await draft.forward_backward([datum([5, 6, 7])], loss_fn="eagle3", config=config)
    assert output.metrics["objective_letters:last"] == 8
    nested = {"data": DATA, "loss_fn": "eagle3", "loss_fn_config": config}
    answer = await draft.do("forward_backward", forward_backward_input=nested)
    assert answer["metrics"]["objective_letters:last"] == 8


async def test_the_seed_for_anchors_is_journaled(server: Server) -> None:
    draft = await create_draft(server, algorithm="dflash")
    seeds = [
        (await draft_metrics(draft, loss_fn="dflash", loss_fn_config=each))["seed"]
        for each in ({}, {"objective": "ce"})
    ]
    output = await draft.forward_backward([datum([5, 6, 7])], loss_fn="dflash", config={"gamma": 7.0})
    seeds.append(output.metrics["seed:last"])
    assert (await draft_metrics(draft, loss_fn="dflash", loss_fn_config={"seed": 12}))["seed"] == 12
    assert (await draft_metrics(draft, loss_fn="eagle3"))["seed"] == -1
    (segment,) = (server.services.config.store.state_dir / "journal").glob("*.segment")
    drawn = {entry.header.seq_id: dict(entry.header.drawn) for entry in read_journal(segment) if entry.header.seq_id}
    assert [drawn[seq_id] for seq_id in (1, 2, 3)] == [{"seed": int(seed)} for seed in seeds]
    assert len(set(seeds)) == 3 and drawn[4] == drawn[5] == {}


# Checkpoints


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("save_weights", "weights"),
        ("save_weights_for_sampler", "sampler_weights"),
        ("save_weights_external", "external_weights"),
    ],
)
async def test_a_checkpoint_of_a_draft_records_its_config_and_target(
    server: Server, verb: str, kind: CheckpointKind
) -> None:
    target = await saved_policy(server, 3)
    draft = await create_draft(server, capture_layers=(1, 2), target_path=target)
    path = (await draft.do(verb, path="a"))["path"]
    assert path == f"tinker://{draft.model_id}/{kind}/a"
    record = await server.services.store.checkpoints.get(draft.model_id, kind, "a")
    assert record is not None and (record.role, record.target_path) == ("draft", target)
    manifest = read_manifest(Path(record.directory))
    assert (manifest["role"], manifest["target_path"]) == ("draft", target)
    assert manifest["training"] == (await info(draft))["draft"] | dict.fromkeys(
        ("block_size", "mask_token_id", "target_repr", "target_top_k")
    )


async def test_a_draft_from_a_checkpoint_has_the_saved_config_and_target(server: Server) -> None:
    target = await saved_policy(server, 3)
    draft = await create_draft(server, capture_layers=(1, 2))
    await draft.do("set_target", path=target)
    saved = (await draft.do("save_weights", path="b"))["path"]
    copy = (await server.post("copy_weights", {"source_path": saved}))["tinker_path"]
    for source in (saved, copy):
        again = await load(server, source)
        assert (await draft_metrics(again))["target_seed"] == 3
        described = await info(again)
        assert (described["draft"], described["target_path"]) == ((await info(draft))["draft"], target)
    weights = types.WeightsInfoResponse.model_validate(await server.post("weights_info", {"tinker_path": saved}))
    assert (weights.is_lora, weights.lora_rank) == (False, None)


async def test_a_draft_from_a_checkpoint_has_no_target_if_that_was_deleted(server: Server) -> None:
    target = await saved_policy(server, 3)
    saved = (await (await create_draft(server, target_path=target)).do("save_weights", path="b"))["path"]
    await remove(server, target)
    again = await load(server, saved)
    assert (await draft_metrics(again))["target_seed"] == BARE and "target_path" not in await info(again)


async def test_a_draft_from_another_tenants_checkpoint_has_its_target_only_if_readable(server: Server) -> None:
    target = await saved_policy(server, 3)
    saved = (await (await create_draft(server, target_path=target)).do("save_weights", path="a"))["path"]
    await publish(server, saved)
    theirs = await load(server, saved, BOB)
    assert (await draft_metrics(theirs))["target_seed"] == BARE
    assert "target_path" not in await info(theirs), "the path is not shown"
    await publish(server, target)
    assert (await draft_metrics(await load(server, saved, BOB)))["target_seed"] == 3


async def test_loading_weights_keeps_the_target(server: Server) -> None:
    first, second = [await saved_policy(server, seed) for seed in (3, 4)]
    draft = await create_draft(server, target_path=first)
    saved = (await draft.do("save_weights", path="a"))["path"]
    await draft.do("set_target", path=second)
    assert "error" not in await draft.do("load_weights", path=saved, optimizer=True)
    found = await draft_metrics(draft)
    assert (found["target_seed"], found["loads"]) == (4, 1)


async def test_a_draft_from_a_checkpoint_is_rebuilt_after_its_deletion(
    config: ServerConfig, dispatch: WorkerDispatch
) -> None:
    """The draft's checkpoint, target and snapshots no longer exist."""
    async with running_server(config, dispatch) as server:
        target = await saved_policy(server, 3)
        source = await create_draft(server, target_path=target)
        saved = (await source.do("save_weights", path="a"))["path"]
        draft = await load(server, saved)
        assert pinned_names(server, draft) == ["0", "0-target"]
        for path in (target, saved):
            await remove(server, path)
        await draft_metrics(draft)
    for snapshots in (config.store.state_dir / "snapshots").glob("*/*"):
        (snapshots / "manifest.json").unlink()
    async with running_server(config, dispatch) as server:
        draft.server = server
        found = await draft_metrics(draft)
        assert (found["target_seed"], found["loads"]) == (3, 1)


async def test_drafts_load_draft_checkpoints_and_only_those(server: Server) -> None:
    draft, policy = await create_draft(server), await create_policy(server, 3)
    of_draft, of_policy = [(await run.do("save_weights", path="a"))["path"] for run in (draft, policy)]
    for run, path, ours, theirs in ((draft, of_policy, "draft", "policy"), (policy, of_draft, "policy", "draft")):
        failed = await run.do("load_weights", path=path)
        assert (
            f"was saved by a {theirs}, and run {run.model_id} is a {ours}: load it into a {theirs}" in failed["error"]
        )
    body = {"session_id": draft.session_id, "model_seq_id": 1}
    for path, role in ((of_policy, "draft"), (of_draft, "reference"), (of_draft, "policy"), (of_draft, "critic")):
        refused = await server.post("load_weights", body | {"path": path, "model_role": role}, status=400)
        assert f"no {role} can be created from it, since" in refused["detail"]
    assert "error" not in await draft.do("load_weights", path=of_draft, optimizer=True)


async def test_a_draft_cannot_be_sampled_by_itself(server: Server) -> None:
    draft = await create_draft(server)
    failed = await draft.do("save_weights_for_sampler")
    assert failed["error"].startswith("a draft cannot be sampled by itself: give a path")
    saved = (await draft.do("save_weights_for_sampler", path="a"))["path"]
    asked = sample_body("") | {"sampling_session_id": None, "seq_id": None, "model_path": saved}
    refused = await server.post("asample", asked, status=400)
    assert "was saved by a draft, which cannot sample" in refused["detail"]


# The rest


async def test_the_examples_of_draft_routes_work(server: Server) -> None:
    """test_openapi tests the examples of all other routes."""
    path = await saved_policy(server, 3)
    draft = await create_draft(server)
    paths = (await server.clients[ALICE].get("http://test/openapi.json")).json()["paths"]
    for name in ("set_target", "build_vocab_map", "release_features"):
        content = paths[f"/api/v1/{name}"]["post"]["requestBody"]["content"]
        example = json.dumps(content["application/json"]["example"]).replace(DRAFT_ID, draft.model_id)
        body = json.loads(example.replace(f"tinker://{MODEL_ID}/weights/step-100", path))
        answer = await server.post(name, body, Prefer="wait=30")
        assert answer["type"] == name


async def test_drafts_can_run_in_a_separate_rank_group(
    config: ServerConfig, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, role_groups=(parse_role_group("draft=single"),))
    async with started_dispatch(config, with_noting_worker) as dispatch, running_server(config, dispatch) as server:
        target = await saved_policy(server, 3)
        draft, policy = await create_draft(server, target_path=target), await create_policy(server, 4)
        groups = await dispatch.memory()
        assert policy.model_id in groups[MODEL] and draft.model_id not in groups[MODEL]
        assert draft.model_id in groups[f"{MODEL} (draft)"]
        assert (await draft_metrics(draft))["target_seed"] == 3
