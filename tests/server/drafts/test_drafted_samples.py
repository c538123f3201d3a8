"""Sampling with draft models over HTTP, by a real worker that runs both the target and the draft."""

import asyncio
import json
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from trainhouse.schemas.sampling import ModelInput, SampleRequest
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.journal.journal import Header, Journal
from trainhouse.server.sampling.draft_loader import DraftLoader, draft_id
from trainhouse.server.sampling.sampler import Sampler
from trainhouse.server.store import CheckpointRecord
from trainhouse.server.tenants.auth import Tenant
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ...drawn import Drawn, all_drawn, as_drawn, assert_same_sample
from ...letters import save_letter_tokenizer
from ..api import needs_openai
from ..real import ALICE, BOB, MODEL, Server, batch, running_server, sample, sample_body, server_config
from .test_drafts import create_draft, create_policy, publish, remove

pytestmark = pytest.mark.anyio

OTHER = "tiny/other"
NUM_TOKENS = 40
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "stop": [], "seed": 1}
REQUEST = SampleRequest(prompt=ModelInput.from_ints([5]))
PROMPTS = [[5, 6, 7], [9], list(range(20, 60))]


class RecordingDispatch(WorkerDispatch):
    """Records the ids of the drafts that it loads and drops."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config.dispatch_config())
        self.loaded: list[str] = []
        self.dropped: list[str] = []

    async def load_draft(self, base_model: str, draft_id: str, directory: Path) -> None:
        self.loaded.append(draft_id)
        await super().load_draft(base_model, draft_id, directory)

    async def drop_draft(self, base_model: str, draft_id: str) -> None:
        self.dropped.append(draft_id)
        await super().drop_draft(base_model, draft_id)


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a tiny model that has a tokenizer."""
    model = tmp_path_factory.mktemp("letters") / "model"
    shutil.copytree(tiny_models["qwen3"], model)
    save_letter_tokenizer(model)
    return model


def config_of(model: Path, state_dir: Path, **options: Any) -> ServerConfig:
    config = server_config(model, state_dir, **options)
    return config.with_options(base_models=(*config.models.base_models, ServedModel(OTHER, str(model))))


@asynccontextmanager
async def recording_dispatch(config: ServerConfig) -> AsyncIterator[RecordingDispatch]:
    dispatch = RecordingDispatch(config)
    await dispatch.start(lambda message: None)
    try:
        yield dispatch
    finally:
        await dispatch.close()


@pytest.fixture(scope="module")
async def dispatch(
    model: Path, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[RecordingDispatch]:
    async with recording_dispatch(config_of(model, tmp_path_factory.mktemp("unused"))) as dispatch:
        yield dispatch


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServerConfig:
    return config_of(model, tmp_path / "state")


@pytest.fixture
async def server(config: ServerConfig, dispatch: RecordingDispatch) -> AsyncIterator[Server]:
    dispatch.loaded, dispatch.dropped = [], []
    async with running_server(config, dispatch) as running:
        yield running


async def saved_draft(
    server: Server, key: str = ALICE, verb: str = "save_weights_for_sampler", algorithm: str = "eagle3", **fields: Any
) -> str:
    """Saves a draft that was trained a little, so that some of its tokens are accepted."""
    draft = await create_draft(server, key, algorithm=algorithm, **fields)
    for _ in range(3):
        await draft.forward_backward(batch(), loss_fn=algorithm)
        assert "error" not in await draft.optim_step()
    return (await draft.do(verb, path="a"))["path"]


async def create_sampler(server: Server, key: str = ALICE, status: int = 200, **fields: Any) -> Any:
    """Creates a sampler and returns its id, or the answer if it is refused."""
    session_id = await server.create_session(key)
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL} | fields
    answer = await server.post("create_sampling_session", body, key, status)
    return answer.get("sampling_session_id", answer)


def sample_request(sampler_id: str, tokens: Sequence[int] = (5, 6, 7), **fields: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
    return sample_body(sampler_id, None, **({"prompt": prompt, "sampling_params": GREEDY} | fields))


async def draw(server: Server, body: dict[str, Any], key: str = ALICE) -> Any:
    answer = await server.result((await server.post("asample", body, key))["request_id"], key)
    assert "error" not in answer, answer
    return answer


def tokens_of(answer: Any) -> list[Drawn]:
    return all_drawn(answer)


async def kill_worker(dispatch: WorkerDispatch) -> None:
    os.kill(dispatch.pids(MODEL)[0], signal.SIGKILL)
    while dispatch.is_up(MODEL):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def damage_checkpoints(config: ServerConfig) -> None:
    for file in (config.store.state_dir / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"damaged")


async def wait_for_drops(server: Server, dispatch: RecordingDispatch, number: int) -> None:
    """Waits until `number` drafts have been dropped."""
    async with asyncio.timeout(20):
        while len(dispatch.dropped) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# What is sampled


@pytest.mark.parametrize(("algorithm", "usual"), [("eagle3", 4), ("dflash", 7)])
async def test_greedy_samples_are_the_same_with_and_without_a_draft(server: Server, algorithm: str, usual: int) -> None:
    path = await saved_draft(server, algorithm=algorithm)
    plain, drafted = await create_sampler(server), await create_sampler(server, draft_path=path)
    for tokens in PROMPTS:
        expected, found = [await draw(server, sample_request(each, tokens, num_samples=2)) for each in (plain, drafted)]
        for ours, theirs in zip(found["sequences"], expected["sequences"], strict=True):
            assert_same_sample(ours, theirs)
        guesses = found["guesses"]
        assert "guesses" not in expected, "without a draft there are no counts"
        assert guesses["accepted"] <= guesses["drafted"] <= usual * guesses["passes"]
        assert guesses["drafted"] > usual / 2 * guesses["passes"]
        assert sum(guesses["by_accepted"]) == guesses["passes"] > 0
        accepted = sum(number * times for number, times in enumerate(guesses["by_accepted"]))
        assert accepted == guesses["accepted"]
        assert guesses["acceptance_length"] == pytest.approx(1 + accepted / guesses["passes"])


async def test_a_policy_can_be_sampled_with_a_draft_of_the_base_model(server: Server) -> None:
    path, policy = await saved_draft(server), await create_policy(server, 3)
    await policy.train(batch(), 3)
    sampler_id = (await policy.do("save_weights_for_sampler"))["sampling_session_id"]
    saved = (await policy.do("save_weights_for_sampler", path="a"))["path"]
    of_checkpoint = await create_sampler(server, model_path=saved, base_model=None, draft_path=path)
    plain = await draw(server, sample_request(sampler_id))
    bare = await draw(server, sample_request(await create_sampler(server)))
    assert tokens_of(plain) != tokens_of(bare), "the policy samples other tokens than its base model"
    for body in (sample_request(sampler_id, draft_path=path), sample_request(of_checkpoint)):
        found = await draw(server, body)
        assert tokens_of(found) == tokens_of(plain) and found["guesses"]["passes"] > 0


@pytest.mark.slow
async def test_a_request_may_name_its_own_draft_or_none(server: Server, dispatch: RecordingDispatch) -> None:
    first, second = [await saved_draft(server) for _ in range(2)]
    sampler_id = await create_sampler(server, draft_path=first)
    assert "guesses" not in await draw(server, sample_request(sampler_id, draft_path=""))
    assert dispatch.loaded == [], "only requested drafts are loaded"
    for fields in ({"draft_path": second}, {}, {"draft_path": None}, {"draft_path": second.removeprefix("tinker://")}):
        assert "guesses" in await draw(server, sample_request(sampler_id, **fields))
    assert [each.partition("@")[0] for each in dispatch.loaded] == [f"draft:{second}", f"draft:{first}"]
    one_shot = sample_request("", draft_path=second) | {"sampling_session_id": None, "base_model": MODEL}
    assert "guesses" in await draw(server, one_shot)
    described = await server.clients[ALICE].get(f"samplers/{sampler_id}")
    assert described.json() == {"sampler_id": sampler_id, "base_model": MODEL, "draft_path": first}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "asked_for", "num"),
    [("eagle3", 1, 1), ("eagle3", 3, 3), ("eagle3", 63, 16), ("dflash", 3, 3), ("dflash", 10, 7)],
)
async def test_num_draft_tokens_limits_the_draft_tokens_of_a_pass(
    server: Server, algorithm: str, asked_for: int, num: int
) -> None:
    """The limit is at most what the draft supports."""
    fields: dict[str, Any] = {"block_size": 8} if algorithm == "dflash" else {}
    sampler_id = await create_sampler(server, draft_path=await saved_draft(server, algorithm=algorithm, **fields))
    guesses = (await draw(server, sample_request(sampler_id, num_draft_tokens=asked_for)))["guesses"]
    assert guesses["drafted"] <= num * guesses["passes"] and len(guesses["by_accepted"]) <= num + 1
    # Towards the end of a sample there is room for fewer.
    assert guesses["drafted"] > num / 2 * guesses["passes"]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"7": 2.0}},
        {"min_tokens": 3, "stop": [9]},
    ],
)
async def test_parameters_that_drafts_do_not_support_are_sampled_without(
    server: Server, params: dict[str, Any]
) -> None:
    path, own = await saved_draft(server), {"sampling_params": GREEDY | params}
    plain, drafted = [
        await draw(server, sample_request(await create_sampler(server, draft_path=each), **own))
        for each in (None, path)
    ]
    assert tokens_of(drafted) == tokens_of(plain) and "guesses" not in drafted


async def test_the_official_sdk_reads_drafted_samples(server: Server) -> None:
    path = await saved_draft(server)
    plain, drafted = [
        await sample(server, sample_request(await create_sampler(server, draft_path=each))) for each in (None, path)
    ]
    assert as_drawn(drafted.sequences[0]) == as_drawn(plain.sequences[0])


@pytest.mark.parametrize("verb", ["save_weights", "save_weights_external"])
async def test_a_draft_may_be_any_kind_of_checkpoint(server: Server, verb: str) -> None:
    sampler_id = await create_sampler(server, draft_path=await saved_draft(server, verb=verb))
    assert (await draw(server, sample_request(sampler_id)))["guesses"]["passes"] > 0


# What is refused


async def test_checkpoints_that_are_no_draft_of_the_base_model_are_refused(server: Server) -> None:
    path, policy = await saved_draft(server), await create_policy(server, 3)
    of_policy = (await policy.do("save_weights_for_sampler", path="a"))["path"]
    missing = f"{path}-not"
    cases = [
        ({"draft_path": "nothing"}, 400, "'nothing' is not a checkpoint path"),
        ({"draft_path": missing}, 404, f"there is no checkpoint {missing}"),
        ({"draft_path": of_policy}, 400, "was saved by a policy, which cannot draft tokens"),
        ({"draft_path": path, "base_model": OTHER}, 400, f"was trained for {MODEL}, but the request samples {OTHER}"),
    ]
    for fields, status, reason in cases:
        assert reason in (await create_sampler(server, status=status, **fields))["detail"]
        one_shot = sample_request("", **({"base_model": MODEL} | fields)) | {"sampling_session_id": None}
        assert reason in (await server.post("asample", one_shot, status=status))["detail"]
    sampler_id = await create_sampler(server)
    refused = sample_body(sampler_id, 3, draft_path=missing)
    assert "there is no checkpoint" in (await server.post("asample", refused, status=404))["detail"]
    assert "guesses" in await draw(server, refused | {"draft_path": path}), "the seq_id was not used"
    for number in (0, 64):
        refused = sample_request(sampler_id, draft_path=path, num_draft_tokens=number)
        assert "num_draft_tokens" in (await server.post("asample", refused, status=400))["detail"]


async def test_drafts_of_both_algorithms_are_used_concurrently(server: Server) -> None:
    """Drafts are named by the sampler or by the request, also for a policy and for several samples."""
    chain, block = await saved_draft(server), await saved_draft(server, algorithm="dflash")
    policy = await create_policy(server, 3)
    await policy.train(batch(), 3)
    of_policy = (await policy.do("save_weights_for_sampler"))["sampling_session_id"]
    plain, drafted = await create_sampler(server), await create_sampler(server, draft_path=block)
    for sampler_id, others in ((plain, (drafted, plain)), (of_policy, (of_policy, of_policy))):
        expected = tokens_of(await draw(server, sample_request(sampler_id, num_samples=2)))
        bodies = [
            sample_request(each, num_samples=2, draft_path=path) for each in others for path in (chain, block, "")
        ]
        answers = await asyncio.gather(*(draw(server, body) for body in bodies))
        assert [tokens_of(each) for each in answers] == [expected] * len(bodies)
        assert ["guesses" in each for each in answers] == [True, True, False] * 2


async def test_another_tenants_draft_can_be_used_only_when_public(server: Server) -> None:
    path = await saved_draft(server)
    theirs = await create_sampler(server, BOB)
    refused = await create_sampler(server, BOB, status=404, draft_path=path)
    assert "there is no checkpoint" in refused["detail"]
    assert await server.post("asample", sample_request(theirs, draft_path=path), BOB, status=404) == refused
    await publish(server, path)
    assert "guesses" in await draw(server, sample_request(theirs, draft_path=path), BOB)


# What is loaded


@pytest.mark.slow
async def test_a_draft_is_loaded_once_and_dropped_with_its_last_sampler(
    server: Server, dispatch: RecordingDispatch
) -> None:
    path = await saved_draft(server)
    samplers = [await create_sampler(server, draft_path=path) for _ in range(3)]
    for answer in await asyncio.gather(*(draw(server, sample_request(each)) for each in samplers * 2)):
        assert answer["guesses"]["passes"] > 0
    (loaded,) = dispatch.loaded
    for sampler_id in samplers:
        assert dispatch.dropped == [] and dispatch.has_weights(MODEL, loaded)
        session_id = sampler_id.partition(":")[0]
        await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}}, status=204)
    await wait_for_drops(server, dispatch, 1)
    assert dispatch.dropped == [loaded]
    assert "guesses" in await draw(server, sample_request(await create_sampler(server, draft_path=path)))
    assert dispatch.loaded == [loaded, loaded]


async def loader_of_a_draft(
    server: Server, dispatch: RecordingDispatch
) -> tuple[DraftLoader, CheckpointRecord, Sampler]:
    """Returns a loader that drops unused drafts at once, the checkpoint of one, and a sampler that names it."""
    sampler = server.services.samplers.find(await create_sampler(server, draft_path=await saved_draft(server)))
    assert sampler is not None
    drafts = DraftLoader(dispatch, server.services.checkpoints, unused_seconds=0.0)
    return drafts, await drafts.find(sampler.record.tenant_id, str(sampler.record.draft_path), MODEL), sampler


class Held:
    """Makes calls of a method wait: the first for the first event, the others for the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dispatch: RecordingDispatch, name: str, num: int = 1) -> None:
        self.is_called, self.may_run = asyncio.Event(), [asyncio.Event() for _ in range(num)]
        self._call, self._waiting = getattr(dispatch, name), chain(self.may_run, repeat(self.may_run[-1]))
        monkeypatch.setattr(dispatch, name, self)

    async def __call__(self, *arguments: Any) -> None:
        self.is_called.set()
        await next(self._waiting).wait()
        await self._call(*arguments)


async def test_a_draft_without_samplers_is_dropped_after_a_timeout(server: Server, dispatch: RecordingDispatch) -> None:
    drafts, checkpoint, _ = await loader_of_a_draft(server, dispatch)
    for number in (1, 2):
        async with drafts.use(checkpoint) as first, drafts.use(checkpoint) as second:
            assert first == second == draft_id(checkpoint)
            await asyncio.sleep(0.05)
            assert dispatch.has_weights(MODEL, draft_id(checkpoint)) and len(dispatch.loaded) == number
        await wait_for_drops(server, dispatch, number)
    await drafts.close()


async def test_a_load_of_a_cancelled_request_is_shared_or_dropped_at_its_end(
    server: Server, dispatch: RecordingDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint, sampler = await loader_of_a_draft(server, dispatch)
    drafts = server.services.drafts
    assert await drafts.draft_for(sampler, REQUEST) == checkpoint
    held = Held(monkeypatch, dispatch, "load_draft", 2)

    async def use() -> None:
        async with drafts.use(checkpoint):
            assert dispatch.has_weights(MODEL, draft_id(checkpoint))

    asking = [asyncio.create_task(use()) for _ in range(2)]
    await held.is_called.wait()
    asking[0].cancel()
    await asyncio.sleep(0.05)
    held.may_run[0].set()
    await asking[1]
    assert len(dispatch.loaded) == 1
    await dispatch.drop_draft(MODEL, draft_id(checkpoint))
    held.is_called.clear()
    asking = asyncio.create_task(use())
    await held.is_called.wait()
    asking.cancel()
    await asyncio.wait({asking})
    drafts.release_of(sampler)
    await asyncio.sleep(0.05)
    held.may_run[1].set()
    await asyncio.gather(*drafts._tasks)
    assert len(dispatch.loaded) == len(dispatch.dropped) == 2
    assert not dispatch.has_weights(MODEL, draft_id(checkpoint))


async def test_a_draft_in_use_again_is_not_dropped_by_an_earlier_user(
    server: Server, dispatch: RecordingDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, checkpoint, sampler = await loader_of_a_draft(server, dispatch)
    held = Held(monkeypatch, dispatch, "drop_draft", 2)
    async with drafts.use(checkpoint):
        pass
    await held.is_called.wait()
    assert await drafts.draft_for(sampler, REQUEST) == checkpoint
    drafts.release_of(sampler)
    held.may_run[0].set()
    await wait_for_drops(server, dispatch, 1)
    async with drafts.use(checkpoint):
        held.may_run[1].set()
        await asyncio.sleep(0.05)
        assert dispatch.has_weights(MODEL, draft_id(checkpoint))
    await drafts.close()


async def test_a_draft_that_is_being_dropped_is_loaded_again_before_it_is_used(
    server: Server, dispatch: RecordingDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, checkpoint, _ = await loader_of_a_draft(server, dispatch)
    held = Held(monkeypatch, dispatch, "drop_draft")

    async def use() -> bool:
        async with drafts.use(checkpoint):
            held.may_run[0].set()
            await wait_for_drops(server, dispatch, 1)
            await asyncio.sleep(0.2)
            return dispatch.has_weights(MODEL, draft_id(checkpoint))

    async with drafts.use(checkpoint):
        pass
    await held.is_called.wait()
    using = asyncio.create_task(use())
    await asyncio.sleep(0.05)
    held.may_run[0].set()
    assert await using and len(dispatch.loaded) == 2
    await drafts.close()


async def test_a_draft_is_reloaded_after_a_worker_crash(server: Server, dispatch: RecordingDispatch) -> None:
    path = await saved_draft(server)
    sampler_id = await create_sampler(server, draft_path=path)
    before = await draw(server, sample_request(sampler_id))
    await kill_worker(dispatch)
    after = await draw(server, sample_request(sampler_id))
    assert tokens_of(after) == tokens_of(before) and after["guesses"] == before["guesses"]
    assert len(dispatch.loaded) == 2


@pytest.mark.slow
async def test_a_sample_interrupted_by_a_crash_continues_with_its_draft(
    server: Server, dispatch: RecordingDispatch
) -> None:
    sampler_id = await create_sampler(server, draft_path=await saved_draft(server))
    params = GREEDY | {"max_tokens": 300}
    expected = await draw(server, sample_request(sampler_id, sampling_params=params))
    [worker] = dispatch.pids(MODEL)
    os.kill(worker, signal.SIGSTOP)  # so that it cannot answer before it dies
    submitted = await server.post("asample", sample_request(sampler_id, sampling_params=params, num_samples=8))
    await asyncio.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    found = await server.result(submitted["request_id"])
    assert tokens_of(found) == tokens_of(expected) * 8 and found["guesses"]["passes"] > 0
    assert len(dispatch.loaded) == 2


@pytest.mark.slow
async def test_a_deleted_draft_is_used_while_it_is_loaded(server: Server, dispatch: RecordingDispatch) -> None:
    path = await saved_draft(server)
    sampler_id = await create_sampler(server, draft_path=path)
    before = await draw(server, sample_request(sampler_id))
    await remove(server, path)
    assert (await draw(server, sample_request(sampler_id)))["guesses"] == before["guesses"]
    refused = await server.post("asample", sample_request(sampler_id, draft_path=path), status=404)
    assert "there is no checkpoint" in refused["detail"], "a new request for it is refused"
    await kill_worker(dispatch)
    refused = await server.post("asample", sample_request(sampler_id), status=404)
    assert f"the draft of sampler {sampler_id} cannot be loaded: there is no checkpoint {path}" in refused["detail"]
    assert tokens_of(await draw(server, sample_request(sampler_id, draft_path=""))) == tokens_of(before)


async def test_a_damaged_draft_fails_the_sample(server: Server, dispatch: RecordingDispatch) -> None:
    path = await saved_draft(server)
    sampler_id = await create_sampler(server, draft_path=path)
    damage_checkpoints(server.services.config)
    failed = await server.result((await server.post("asample", sample_request(sampler_id)))["request_id"])
    assert f"{path} cannot be read: its files are lost" in failed["error"] and failed["category"] == "server"


# Over a restart


async def journal_sample(config: ServerConfig, tenant: Tenant, sampler_id: str, number: int, **fields: Any) -> None:
    """Journals a request as a server does that accepts it and then stops."""
    journal = Journal(config.store.state_dir / "journal", 1 << 20)
    header = Header("sample", tenant.id, sampler_id, number, f"{sampler_id}:{number}", drawn={"seed": 5})
    await journal.append(header, json.dumps(sample_request(sampler_id, **fields) | {"seq_id": number}).encode())
    await journal.close()


async def test_a_recovered_request_uses_its_draft_or_none_if_it_was_deleted(
    config: ServerConfig, dispatch: RecordingDispatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(config, dispatch) as former:
        kept, gone = [await saved_draft(former) for _ in range(2)]
        sampler_id = await create_sampler(former, draft_path=kept)
        plain = await draw(former, sample_request(await create_sampler(former)))
        await remove(former, gone)
        tenant = await former.services.auth.authenticate(ALICE)
    await journal_sample(config, tenant, sampler_id, 1)
    await journal_sample(config, tenant, sampler_id, 2, draft_path=gone)
    with caplog.at_level(logging.WARNING):
        async with running_server(config, dispatch) as latter:
            with_draft, without = [await latter.result(f"{sampler_id}:{number}") for number in (1, 2)]
            again = await draw(latter, sample_request(sampler_id))
    assert tokens_of(with_draft) == tokens_of(without) == tokens_of(again) == tokens_of(plain)
    assert "guesses" in with_draft and "guesses" in again and "guesses" not in without
    assert f"{sampler_id}:2 continues without its draft: there is no checkpoint {gone}" in caplog.text
    assert f"{sampler_id}:1 continues without" not in caplog.text


async def test_a_recovered_request_continues_without_a_damaged_draft(
    config: ServerConfig, dispatch: RecordingDispatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(config, dispatch) as former:
        path = await saved_draft(former)
        sampler_id = await create_sampler(former, draft_path=path)
        tenant = await former.services.auth.authenticate(ALICE)
    damage_checkpoints(config)
    await journal_sample(config, tenant, sampler_id, 1)
    with caplog.at_level(logging.WARNING):
        async with running_server(config, dispatch) as latter:
            answer = await latter.result(f"{sampler_id}:1")
    assert len(tokens_of(answer)[0]) == NUM_TOKENS and "guesses" not in answer
    assert f"{sampler_id}:1 continues without its draft: {path} cannot be read" in caplog.text


# OpenAI's API


@pytest.mark.slow
@needs_openai
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
async def test_openai_usage_counts_draft_tokens(server: Server, algorithm: str) -> None:
    path = await saved_draft(server, algorithm=algorithm)
    await server.services.tokenizers.get(MODEL)
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}

    async def completed(status: int = 200, **fields: Any) -> Any:
        answer = await server.clients[ALICE].post("http://test/v1/completions", json=body | fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    plain = await completed()
    assert "completion_tokens_details" not in plain["usage"]
    for name in (MODEL, await create_sampler(server, draft_path=path)):
        fields = {"draft_path": path, "num_draft_tokens": 3} if name == MODEL else {}
        found = await completed(model=name, **fields)
        assert found["choices"][0]["text"] == plain["choices"][0]["text"]
        details = found["usage"]["completion_tokens_details"]
        assert sum(details.values()) > 0 and min(details.values()) >= 0
    refused = await completed(404, draft_path=f"{path}-not")
    assert "there is no checkpoint" in refused["error"]["message"]
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "draft_path": path}
    events = (await server.clients[ALICE].post("http://test/v1/completions", json=body | streamed)).text
    assert '"completion_tokens_details":{"accepted_prediction_tokens":' in events


@pytest.mark.slow
@needs_openai
async def test_openai_errors_name_the_draft(server: Server) -> None:
    path = await saved_draft(server)
    of_policy = (await (await create_policy(server, 3)).do("save_weights_for_sampler", path="a"))["path"]
    own = await create_sampler(server, draft_path=path)
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS}

    async def refused(status: int, **fields: Any) -> Any:
        """Returns the error, which a stream that has not begun gets as well."""
        url, request = "http://test/v1/completions", body | fields
        whole, streamed = [await server.clients[ALICE].post(url, json=request | {"stream": each}) for each in (0, 1)]
        assert (whole.status_code, streamed.status_code) == (status, status), whole.text
        assert whole.json() == streamed.json()
        return whole.json()["error"]

    damage_checkpoints(server.services.config)
    cases = [({"draft_path": "nothing"}, 400), ({"draft_path": of_policy}, 400), ({"draft_path": f"{path}-not"}, 404)]
    for fields, status in [*cases, ({"draft_path": path}, 503), ({"model": own}, 503)]:
        error = await refused(status, **fields)
        assert error["param"] == "draft_path", error
    await remove(server, path)
    assert (await refused(404, model=own))["param"] == "draft_path"
    assert (await refused(404, model=f"{path}-not", draft_path=path))["param"] == "model"
    assert (await refused(400, num_draft_tokens=0))["param"] == "num_draft_tokens"


# Other sampling backends


@pytest.mark.slow
async def test_every_sampler_group_loads_the_draft(model: Path, tmp_path: Path) -> None:
    config = server_config(model, tmp_path, sampler_workers=2)
    async with recording_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        path = await saved_draft(server)
        drafted, plain = await create_sampler(server, draft_path=path), await create_sampler(server)
        expected = await draw(server, sample_request(plain))
        answers = await asyncio.gather(*(draw(server, sample_request(drafted)) for _ in range(6)))
        assert all(tokens_of(each) == tokens_of(expected) and "guesses" in each for each in answers)
        (loaded,) = dispatch.loaded
        os.kill(dispatch.pids(MODEL)[-1], signal.SIGKILL)
        for _ in range(3):
            answers = await asyncio.gather(*(draw(server, sample_request(drafted)) for _ in range(6)))
            assert all(tokens_of(each) == tokens_of(expected) for each in answers)
        async with asyncio.timeout(30):
            while not dispatch.has_weights(MODEL, loaded):
                await draw(server, sample_request(drafted))


async def test_drafts_are_refused_with_vllm(model: Path, tmp_path: Path) -> None:
    """vLLM is not called at all."""
    config = server_config(model, tmp_path, sampler="vllm", vllm_url="http://127.0.0.1:9")
    async with recording_dispatch(config) as dispatch, running_server(config, dispatch) as server:
        path = await saved_draft(server)
        failed = await server.post("asample", sample_request(await create_sampler(server, draft_path=path)))
        answer = await server.result(failed["request_id"])
        assert "draft_path is not supported by a vLLM that started without a draft" in answer["error"]
        assert answer["category"] == "user"
