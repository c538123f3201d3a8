"""unload_model ends one model of a session, for good."""

import asyncio

import pytest

from ..real import ALICE, BOB, Server

pytestmark = pytest.mark.anyio


async def test_an_unloaded_model_is_gone_and_the_rest_of_its_session_stays(server: Server) -> None:
    session_id = await server.create_session()
    unloaded, other = [await server.create_run(session_id=session_id, number=number) for number in range(2)]
    sampler_id = (await unloaded.do("save_weights_for_sampler"))["sampling_session_id"]
    path = (await unloaded.do("save_weights", path="kept"))["path"]
    body = {"model_id": unloaded.model_id}
    await server.post("unload_model", body, key=BOB, status=404)
    first, retried = await asyncio.gather(server.post("unload_model", body), server.post("unload_model", body))
    assert first == retried == await server.post("unload_model", body)
    result = await server.result(first["request_id"])
    assert result == {"model_id": unloaded.model_id, "type": "unload_model"}
    runs = server.services.runs
    assert runs.num_parameters(unloaded.model_id) is None and runs.num_parameters(other.model_id)
    assert "it was unloaded" in (await server.post("get_info", body, status=410))["detail"]
    assert (await other.do("save_weights", path="b"))["path"]
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    sample = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    sampled = await server.result((await server.post("asample", sample))["request_id"])
    assert len(sampled["sequences"]) == 1, "its sampler stays"
    again = {"session_id": session_id, "model_seq_id": 2, "path": path, "optimizer": True}
    assert "error" not in await server.result((await server.post("load_weights", again))["request_id"])


async def test_a_session_that_ended_by_itself_was_not_unloaded(server: Server) -> None:
    run = await server.create_run()
    await server.clients[ALICE].post(f"sessions/{run.session_id}/finish", json={"reason": {"type": "success"}})
    await server.post("unload_model", {"model_id": run.model_id}, status=410)
