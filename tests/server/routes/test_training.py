"""Training over HTTP against a real worker, with the SDK's encoder and decoder and with plain JSON."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tinker import types
from trainhouse.server.files.manifest import MANIFEST
from trainhouse.workers.dispatch import WorkerDispatch

from ...drawn import assert_same_sample
from ..real import (
    ADAM,
    ALICE,
    BOB,
    MODEL,
    PROTOBUF,
    VOCAB,
    Run,
    Server,
    batch,
    datum,
    running_server,
    sample,
    sample_body,
    server_config,
)

pytestmark = pytest.mark.anyio


async def test_training_lowers_the_loss_and_returns_logprobs(server: Server) -> None:
    run = await server.create_run()
    output = await run.forward_backward(batch())
    logprobs = np.concatenate([one["logprobs"].to_numpy() for one in output.loss_fn_outputs])
    assert [len(one["logprobs"].to_numpy()) for one in output.loss_fn_outputs] == [
        one.model_input.length for one in batch()
    ]
    assert output.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-5)
    metrics = (await run.optim_step())["metrics"]
    assert metrics["unclipped_grad_l2:mean"] > 0
    losses = await run.train(batch(), 6)
    assert losses[-1] < 0.8 * output.metrics["loss:sum"]


async def test_json_and_protobuf_give_the_same_results(server: Server) -> None:
    run = await server.create_run()
    data = {"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 2.0]}}
    as_json = await run.do("forward", data=[data], loss_fn="cross_entropy")
    as_protobuf = await run.forward_backward(
        [datum([5, 6, 7, 8], target_tokens=[6, 7, 8], weights=[0.0, 1.0, 2.0])], forward_only=True
    )
    assert as_json["metrics"]["loss:sum"] == pytest.approx(as_protobuf.metrics["loss:sum"], rel=1e-6)
    (output,) = as_json["loss_fn_outputs"]
    assert output["logprobs"]["data"] == pytest.approx(as_protobuf.loss_fn_outputs[0]["logprobs"].to_numpy(), rel=1e-5)
    assert "error" in await run.optim_step(), "forward leaves no gradients"


async def test_a_zstd_body_is_accepted(server: Server) -> None:
    run = await server.create_run()
    body = zstandard.ZstdCompressor().compress(run.encode(batch(), next(run.numbers)))
    response = await run.send(body, **{"Content-Encoding": "zstd"})
    assert response.status_code == 200, response.text
    assert "metrics" in await server.result(response.json()["request_id"])
    assert "metrics" in await run.optim_step()


async def test_chunks_in_any_order_give_the_same_update_as_one_batch(server: Server) -> None:
    """Chunk 1 is sent last, as the SDK does, and an optim_step waits for all of them."""
    whole, chunked = await server.create_run(), await server.create_run()
    data = batch(6)
    await whole.train(data, 1)
    for seq_id in (3, 2):
        assert (await chunked.send(chunked.encode(data[2 * seq_id - 2 : 2 * seq_id], seq_id))).status_code == 200
    step = await chunked.submit("optim_step", seq_id=4, adam_params=ADAM)
    assert (await chunked.send(chunked.encode(data[:2], 1))).status_code == 200
    assert "metrics" in await server.result(step["request_id"])
    after = [(await run.forward_backward(data, forward_only=True)).metrics["loss:sum"] for run in (whole,)]
    chunked.numbers = iter(range(5, 10))  # type: ignore[assignment]
    after.append((await chunked.forward_backward(data, forward_only=True)).metrics["loss:sum"])
    assert after[0] == pytest.approx(after[1], rel=1e-5)
    untrained = await server.create_run()
    assert after[0] != pytest.approx((await untrained.forward_backward(data)).metrics["loss:sum"], rel=1e-3)


async def test_a_repeated_submit_is_not_applied_twice(server: Server) -> None:
    once, twice = await server.create_run(), await server.create_run()
    for run, repeats in ((once, 1), (twice, 3)):
        for _ in range(repeats):
            assert (await run.send(run.encode(batch(), 1))).json()["request_id"] == f"{run.model_id}:1"
        for _ in range(repeats):
            await run.submit("optim_step", seq_id=2, adam_params=ADAM)
        assert "metrics" in await server.result(f"{run.model_id}:2")
        run.numbers = iter(range(3, 9))  # type: ignore[assignment]
    losses = [(await run.forward_backward(batch())).metrics["loss:sum"] for run in (once, twice)]
    assert losses[0] == losses[1]


async def test_a_failure_in_a_pipeline_fails_its_own_step_and_no_other(server: Server) -> None:
    """Everything is submitted before anything is answered: the workers have the steps before their batches fail."""
    piped, plain = await server.create_run(), await server.create_run()
    unknown_token = datum([5, VOCAB, 7])
    infinite = datum([5, 6, 7], target_tokens=[6, 7], weights=[np.inf, 1.0])
    bodies = [
        [batch(2, seed=1), [unknown_token]],  # the rest of a window is discarded with the part that failed
        [batch(2)],
        [[infinite], batch(2, seed=1)],
        [None, batch(2, seed=1)],  # a body that cannot be decoded
        [batch(2)],
    ]
    steps = []
    for window in bodies:
        for data in window:
            seq_id = next(piped.numbers)
            body = piped.encode(data or batch(2), seq_id)
            sent = await piped.send(body if data else body[:-5])
            assert sent.status_code == (200 if data else 400), sent.text
        steps.append((await piped.submit("optim_step", adam_params=ADAM))["request_id"])
    results = [await server.result(step) for step in steps]
    assert ["metrics" in result for result in results] == [False, True, False, False, True]
    reasons = [f"forward_backward with seq_id {seq_id}" for seq_id in (2, 6, 9)]
    assert all(reason in results[index]["error"] for reason, index in zip(reasons, (0, 2, 3), strict=True))
    await plain.train(batch(2), 2)
    after = [(await run.forward_backward(batch(), forward_only=True)).metrics["loss:sum"] for run in (piped, plain)]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


async def test_create_model_is_deduplicated_by_model_seq_id(server: Server) -> None:
    session_id = await server.create_session()
    body = {"session_id": session_id, "model_seq_id": 3, "base_model": MODEL, "lora_config": {"rank": 4}}
    first, second = await server.post("create_model", body), await server.post("create_model", body)
    assert first == second == {"request_id": f"{session_id}:train:3:0"}
    assert (await server.result(first["request_id"]))["model_id"] == f"{session_id}:train:3"
    info = await server.post("get_info", {"model_id": f"{session_id}:train:3"})
    assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, MODEL)


async def test_an_absent_seed_is_drawn_once_and_kept(server: Server) -> None:
    first, second = await server.create_run(seed=None), await server.create_run(seed=None)
    records = [await server.services.store.runs.get(run.model_id) for run in (first, second)]
    seeds = [record.training.seed for record in records if record is not None]
    assert None not in seeds and len(set(seeds)) == 2


async def test_saving_and_loading_gives_the_same_next_losses(server: Server) -> None:
    run = await server.create_run()
    await run.train(batch(), 2)
    path = (await run.do("save_weights", path="a"))["path"]
    assert path == f"tinker://{run.model_id}/weights/a"
    expected = await run.train(batch(), 3)
    assert await run.do("load_weights", path=path, optimizer=True) == {
        "path": path,
        "model_id": run.model_id,
        "type": "load_weights",
    }
    assert await run.train(batch(), 3) == expected
    created = await server.post(
        "load_weights", {"session_id": run.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    )
    model_id = (await server.result(created["request_id"]))["model_id"]
    assert model_id == f"{run.session_id}:train:1"
    assert await Run(server, model_id, run.session_id).train(batch(), 3) == expected


async def test_save_state_leaves_pending_gradients_and_load_state_discards_them(server: Server) -> None:
    run, plain = await server.create_run(), await server.create_run()
    before = (await plain.forward_backward(batch())).metrics["loss:sum"]
    await run.forward_backward(batch())
    path = (await run.do("save_weights", path="between"))["path"]
    assert (await run.optim_step())["metrics"] == (await plain.optim_step())["metrics"]
    await run.forward_backward(batch())
    await run.do("load_weights", path=path, optimizer=True)
    after = (await run.forward_backward(batch(), forward_only=True)).metrics["loss:sum"]
    assert after == pytest.approx(before, rel=1e-6)
    assert "forward_backward" in (await run.optim_step())["error"], "no gradients were left"


async def test_an_access_token_loads_another_tenants_checkpoint_and_is_not_stored(server: Server) -> None:
    run = await server.create_run()
    path = (await run.do("save_weights", path="shared"))["path"]
    body = {"path": path, "session_id": await server.create_session(BOB), "model_seq_id": 0}
    await server.post("load_weights", body, key=BOB, status=404)
    created = await server.post("load_weights", body | {"weights_access_token": ALICE}, key=BOB)
    assert "error" not in await server.result(created["request_id"], key=BOB)
    files = [file.read_bytes() for file in server.services.config.store.state_dir.rglob("*") if file.is_file()]
    assert any(path.encode() in content for content in files), "the request itself is journaled"
    assert not any(ALICE.encode() in content for content in files)


async def test_save_checkpoint_and_load_checkpoint_are_accepted(server: Server) -> None:
    run = await server.create_run()
    path = (await run.do("save_checkpoint", path="plain"))["path"]
    assert (await run.do("load_checkpoint", path=path))["path"] == path


async def test_loading_the_optimizer_from_a_checkpoint_without_one_fails(server: Server) -> None:
    run = await server.create_run()
    path = (await run.do("save_weights_for_sampler", path="s"))["path"]
    assert path == f"tinker://{run.model_id}/sampler_weights/s"
    failed = await run.do("load_weights", path=path, optimizer=True)
    assert failed["category"] == "user" and "no optimizer state" in failed["error"]
    assert "error" not in await run.do("load_weights", path=path, optimizer=False)


async def test_an_ephemeral_sampler_keeps_the_weights_of_its_save(server: Server) -> None:
    run = await server.create_run(train_unembed=False)
    await run.train(batch(), 2)
    first = await run.do("save_weights_for_sampler", sampling_session_seq_id=0, kind="snapshot")
    assert first == {"sampling_session_id": f"{run.session_id}:sample:0", "type": "save_weights_for_sampler"}
    body = sample_body(first["sampling_session_id"], sampling_params={"max_tokens": 6, "temperature": 0.0, "stop": []})
    drawn = await sample(server, body)
    await run.train(batch(), 4)
    again = await sample(server, body | {"seq_id": 1})
    assert_same_sample(again.sequences[0], drawn.sequences[0])
    second = await run.do("save_weights_for_sampler", sampling_session_seq_id=1)
    moved = await sample(server, body | {"sampling_session_id": second["sampling_session_id"]})
    assert moved.sequences[0].logprobs != pytest.approx(drawn.sequences[0].logprobs, abs=1e-3)


async def test_a_repeated_ephemeral_save_returns_the_first_sampler(server: Server) -> None:
    """Protocol rule 10."""
    run = await server.create_run()
    for number in (0, 1, 2):
        submitted = await run.submit("save_weights_for_sampler", seq_id=1, sampling_session_seq_id=number)
    assert (await server.result(submitted["request_id"]))["sampling_session_id"] == f"{run.session_id}:sample:0"


async def test_an_inflight_save_updates_earlier_inflight_samplers(server: Server) -> None:
    run = await server.create_run()
    samplers = []
    for number in (0, 1):
        await run.train(batch(), 3)
        saved = await run.do("save_weights_for_sampler", sampling_session_seq_id=number, kind="inflight")
        samplers.append(saved["sampling_session_id"])
    greedy = {"max_tokens": 4, "temperature": 0.0, "stop": []}
    first, second = [await sample(server, sample_body(one, sampling_params=greedy)) for one in samplers]
    assert samplers[0] != samplers[1]
    assert first.sequences[0].logprobs == pytest.approx(second.sequences[0].logprobs, abs=1e-5)


async def test_external_weights_can_be_downloaded(server: Server) -> None:
    run = await server.create_run()
    saved = await run.do("save_weights_external", path="export")
    assert saved["path"] == f"tinker://{run.model_id}/external_weights/export" and saved["size_bytes"] > 0
    client = server.clients[run.key]
    urls = await client.get(f"training_runs/{run.model_id}/checkpoints/external_weights/export/external_weights_urls")
    files = urls.json()["urls"]
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files)
    downloaded = await client.get(files["adapter_config.json"], headers={"X-API-Key": ""})
    assert downloaded.status_code == 200 and downloaded.json()["r"] == 4


async def test_prefer_wait_returns_the_result_itself(server: Server) -> None:
    run = await server.create_run()
    data = [{"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7], "weights": [1.0, 1.0]}}]
    body = {"model_id": run.model_id, "data": data, "loss_fn": "cross_entropy"}
    response = await server.clients[run.key].post("forward_backward", json=body, headers={"Prefer": "wait=20"})
    assert response.json()["metrics"]["loss:sum"] > 0
    assert response.headers["X-Seq-Id"] == "1" and response.headers["X-Request-Id"] == f"{run.model_id}:1"
    as_protobuf = await server.clients[run.key].post(
        "forward", json=body, headers={"Prefer": "wait=20", "Accept": PROTOBUF}
    )
    assert as_protobuf.headers["content-type"] == PROTOBUF
    assert (await server.post("optim_step", {"model_id": run.model_id}, Prefer="respond-async")) == {
        "request_id": f"{run.model_id}:3",
        "model_id": run.model_id,
        "seq_id": 3,
    }


async def test_a_poll_without_a_result_ends_with_408_and_the_reason(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, long_poll_seconds=0.1, seq_gap_seconds=1.0)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        step = await run.submit("optim_step", seq_id=2)
        pending = await server.retrieve(step["request_id"])
        assert pending.status_code == 408
        assert pending.json()["queue_state"] == "paused_capacity" and "seq_id 1" in pending.json()["queue_state_reason"]
        async with asyncio.timeout(30):
            while (answer := await server.retrieve(step["request_id"])).status_code == 408:
                pass
        assert "error" in answer.json()


async def test_runs_results_and_samplers_survive_a_restart(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, long_poll_seconds=1.0)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        loss = (await run.forward_backward(batch())).metrics["loss:sum"]
        path = (await run.do("save_weights", path="kept"))["path"]
        waiting = await run.submit("optim_step", seq_id=9)
        ephemeral = await run.do("save_weights_for_sampler")
        body = sample_body(ephemeral["sampling_session_id"])
        drawn = await sample(server, body)
    async with running_server(config, dispatch) as server:
        assert (await server.result(f"{run.model_id}:1"))["metrics"]["loss:sum"] == loss
        assert (await server.retrieve(waiting["request_id"])).status_code == 408
        again = await sample(server, body | {"seq_id": 1})
        assert_same_sample(again.sequences[0], drawn.sequences[0])
        numbers, run = run.numbers, Run(server, run.model_id, run.session_id)
        run.numbers = numbers
        assert (await run.forward_backward(batch())).metrics["loss:sum"] == loss
        body = {"session_id": run.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
        resumed = await server.result((await server.post("load_weights", body))["request_id"])
        resumed_loss = (await Run(server, resumed["model_id"], run.session_id).forward_backward(batch())).metrics
        assert resumed_loss["loss:sum"] == loss


def only_file(root: Path, pattern: str) -> Path:
    (path,) = root.glob(pattern)
    return path


@pytest.mark.parametrize("kind", ["flipped", "of an earlier version"])
async def test_weights_of_a_sampler_that_were_changed_on_disk_are_refused_by_a_restarted_server(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        await run.train(batch(), 2)
        body = sample_body((await run.do("save_weights_for_sampler"))["sampling_session_id"])
        drawn = (await sample(server, body)).sequences[0]
    weights = only_file(tmp_path, "ephemeral/*/*/*.safetensors")
    if kind == "flipped":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 0x40
        weights.write_bytes(content)
    else:
        weights.with_name(MANIFEST).unlink()
    async with running_server(config, dispatch) as server:
        if kind == "flipped":
            answer = await server.result((await server.post("asample", body | {"seq_id": 1}))["request_id"])
            assert answer["category"] == "server" and f"{weights.name} does not match its manifest" in answer["error"]
            assert "save_weights_for_sampler again" in answer["error"] and str(tmp_path) not in answer["error"]
        else:
            again = (await sample(server, body | {"seq_id": 1})).sequences[0]
            assert_same_sample(again, drawn)


async def test_finishing_a_session_releases_its_runs_and_samplers(server: Server) -> None:
    run = await server.create_run()
    sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
    memory = await server.services.dispatch.memory()
    await server.post(f"sessions/{run.session_id}/finish", {"reason": {"type": "success"}, "detail": None}, status=204)
    assert "ended" in (await run.submit("optim_step", status=410))["detail"]
    assert "ended" in (await server.post("asample", sample_body(sampler_id), status=410))["detail"]
    async with asyncio.timeout(30):
        while sum((await server.services.dispatch.memory())[MODEL].values()) >= sum(memory[MODEL].values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_expired_session_releases_its_runs_and_adapters(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, session_expiry_seconds=1.0)
    async with running_server(config, dispatch) as server:
        before = (await dispatch.memory())[MODEL]["adapters"]
        run = await server.create_run()
        path = (await run.do("save_weights_for_sampler", path="a"))["path"]
        sampler = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path}
        sampler_id = (await server.post("create_sampling_session", sampler))["sampling_session_id"]
        await sample(server, sample_body(sampler_id))
        assert (await dispatch.memory())[MODEL]["adapters"] > before
        async with asyncio.timeout(30):
            while (await dispatch.memory())[MODEL]["adapters"] > before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (
            "expired" in (await server.post("session_heartbeat", {"session_id": run.session_id}, status=410))["detail"]
        )
        await server.post("get_info", {"model_id": run.model_id}, status=410)


async def test_snapshots_let_old_journal_segments_be_deleted(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, journal_segment_bytes=4000, snapshot_steps=2)
    async with running_server(config, dispatch) as server:
        run = await server.create_run()
        await run.train(batch(), 30)
        async with asyncio.timeout(60):
            # Snapshots take longer than these small steps, and the records between two of them are held.
            while len(files := sorted((tmp_path / "journal").iterdir())) > 2:
                await run.train(batch(), 1)
                await asyncio.sleep(0.3)
        assert int(files[-1].stem) > 4, "many segments were written"


async def test_stable_reinforce_uses_the_recorded_samples(server: Server) -> None:
    run = await server.create_run()
    sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
    drawn = await sample(server, sample_body(sampler_id, record_stability_info=True))
    prompt, tokens = [5, 6, 7], list(drawn.sequences[0].tokens)
    sequence_id = f"{sampler_id}:0:0"
    inputs = {"target_tokens": [*prompt[1:], *tokens], "advantages": [0.0, 0.0, *([1.0] * len(tokens))]}
    one = datum([*prompt, *tokens], **inputs).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=sequence_id, length=3),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=sequence_id, offset=1, length=2),
            types.SampledProvenanceSpan(sequence_id=sequence_id, length=len(tokens)),
        ],
    )
    output = await run.forward_backward([one], loss_fn="stable_reinforce")
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()[2:]
    assert logprobs == pytest.approx(drawn.sequences[0].logprobs, abs=1e-4)
    assert output.metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-3), "on policy every ratio is 1"
    assert "metrics" in await run.optim_step()


async def test_readyz_names_a_directory_that_cannot_be_written(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as server:
        (tmp_path / "journal").rename(tmp_path / "aside")
        answer = await server.clients[ALICE].get("readyz")
        assert answer.status_code == 503 and answer.json()["status"] == "unavailable"
        assert f"journal in {tmp_path}/journal cannot be written" in answer.json()["reason"]
        (tmp_path / "aside").rename(tmp_path / "journal")
        answer = await server.clients[ALICE].get("readyz")
        assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (200, "ready", None)
