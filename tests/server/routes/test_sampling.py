"""Sampling over HTTP against a real worker, results read by the SDK's decoder."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.server.files.segment_log import SegmentLog
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.calls import WorkerLost

from ...drawn import Drawn, as_drawn, assert_same_sample
from ..real import (
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

END = 2
"""The end token of tiny models."""


async def base_sampler(server: Server, session_id: str | None = None, number: int = 0) -> str:
    session_id = session_id or await server.create_session()
    body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": MODEL}
    return (await server.post("create_sampling_session", body))["sampling_session_id"]


async def trained_run(server: Server) -> Run:
    run = await server.create_run()
    await run.train(batch(), 3)
    return run


async def test_the_base_model_can_be_sampled(server: Server) -> None:
    sampler_id = await base_sampler(server)
    assert sampler_id.endswith(":sample:0")
    submitted = await server.post("asample", sample_body(sampler_id, num_samples=3))
    assert submitted["sample_sequence_ids"] == [f"{sampler_id}:0:{number}" for number in range(3)]
    answer = await server.result(submitted["request_id"])
    assert [len(sequence["tokens"]) for sequence in answer["sequences"]] == [4, 4, 4]
    assert {sequence["stop_reason"] for sequence in answer["sequences"]} == {"length"}


async def test_a_misspelt_parameter_is_refused_by_name(server: Server) -> None:
    body = sample_body(await base_sampler(server), sampling_params={"max_token": 3})
    refused = await server.post("asample", body, status=400)
    assert "has no max_token: did you mean max_tokens?" in refused["detail"]
    run = await server.create_run()
    refused = await run.submit("optim_step", status=400, adam_params={"learning_rte": 1e-3})
    assert "has no learning_rte: did you mean learning_rate?" in refused["detail"]


async def test_a_repeated_request_is_sampled_once_and_a_seed_repeats(server: Server) -> None:
    sampler_id = await base_sampler(server)
    body = sample_body(sampler_id, sampling_params={"max_tokens": 8, "stop": []})
    first, again = await asyncio.gather(server.post("asample", body), server.post("asample", body))
    assert first == again
    drawn = await sample(server, body)
    other = await sample(server, body | {"seq_id": 1})
    assert drawn.sequences[0].tokens != other.sequences[0].tokens, "a seed is drawn for each request without one"
    seeded = [await sample(server, sample_body(sampler_id, seq_id)) for seq_id in (2, 3)]
    assert as_drawn(seeded[0].sequences[0]) == as_drawn(seeded[1].sequences[0])


async def test_sample_logprobs_match_the_training_logprobs(server: Server) -> None:
    run = await trained_run(server)
    path = (await run.do("save_weights_for_sampler", path="trained"))["path"]
    body = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path}
    sampler_id = (await server.post("create_sampling_session", body))["sampling_session_id"]
    assert (await server.post("create_sampling_session", body))["sampling_session_id"] == sampler_id
    described = await server.clients[run.key].get(f"samplers/{sampler_id}")
    assert described.json() == {"sampler_id": sampler_id, "base_model": MODEL, "model_path": path}
    drawn = (await sample(server, sample_body(sampler_id))).sequences[0]
    tokens = [5, 6, 7, *drawn.tokens]
    scored = (await run.forward_backward([datum(tokens)], forward_only=True)).loss_fn_outputs[0]["logprobs"].to_numpy()
    assert scored[2:] == pytest.approx(drawn.logprobs, abs=1e-4)
    base = (await sample(server, sample_body(await base_sampler(server)))).sequences[0]
    assert base.logprobs != pytest.approx(drawn.logprobs, abs=1e-2)


async def test_a_text_prompt_is_refused_with_the_expected_format(server: Server) -> None:
    sampler_id = await base_sampler(server)
    refused = await server.post("asample", sample_body(sampler_id, prompt="hello"), status=400)
    shape = '{"chunks": [{"type": "encoded_text", "tokens": [...]}]}'
    assert refused["detail"] == f"bad request: prompt is 'hello': send tokens, {shape}"


async def test_prompt_logprobs_and_topk_are_returned_on_request(server: Server) -> None:
    sampler_id = await base_sampler(server)
    answer = await sample(
        server, sample_body(sampler_id, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    )
    assert answer.prompt_logprobs is not None and answer.topk_prompt_logprobs is not None
    assert [value is not None for value in answer.prompt_logprobs] == [False, True, True]
    assert [None if row is None else len(row) for row in answer.topk_prompt_logprobs] == [None, 2, 2]
    plain = await sample(server, sample_body(sampler_id, seq_id=1))
    assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None


async def test_target_prompt_logprobs_keep_the_layout_of_the_request(server: Server) -> None:
    sampler_id = await base_sampler(server)
    scored = await sample(server, sample_body(sampler_id, prompt_logprobs=True))
    dense = {"data": [6, 9, 7, -1], "dtype": "int64", "shape": [2, 2]}
    answer = await sample(server, sample_body(sampler_id, seq_id=1, target_prompt_logprobs=dense))
    assert answer.target_prompt_logprobs is not None and scored.prompt_logprobs is not None
    values = answer.target_prompt_logprobs.to_numpy()
    assert values.shape == (2, 2) and values[1, 1] == 0.0
    assert values[:, 0] == pytest.approx(np.asarray(scored.prompt_logprobs[1:], np.float32), abs=1e-4)


async def test_a_sparse_result_that_is_large_once_dense_is_written_in_pieces(server: Server) -> None:
    sampler_id = await base_sampler(server)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}

    async def scored(num_columns: int, seq_id: int) -> tuple[int, bool, list[float | None]]:
        """Returns the size as protobuf, whether the JSON was sent at once, and its numbers."""
        row = {"data": [6, 9], "dtype": "int64", "shape": [1, num_columns]}
        csr = {"sparse_crow_indices": [0, 2], "sparse_col_indices": [0, num_columns - 1]}
        body = sample_body(sampler_id, seq_id, prompt=prompt, target_prompt_logprobs=row | csr)
        request_id = (await server.post("asample", body))["request_id"]
        short, answer = await server.polled(request_id, accept=PROTOBUF), await server.polled(request_id)
        numbers = answer.json()["target_prompt_logprobs"]["data"]
        return len(short.content), "content-length" in answer.headers, numbers

    few, many = await scored(8, 0), await scored(1_000_000, 1)
    assert few[0] < 200 and many[0] < 200 and few[1] and not many[1]
    assert len(few[2]) == 8 and len(many[2]) == 1_000_000
    assert few[2][0] == many[2][0] and few[2][-1] == many[2][-1] and not any(many[2][1:-1])


async def test_a_stop_token_id_ends_the_sample(server: Server) -> None:
    sampler_id = await base_sampler(server)
    endless = await sample(server, sample_body(sampler_id, sampling_params={"max_tokens": 30, "seed": 3, "stop": []}))
    third = endless.sequences[0].tokens[2]
    stopped = await sample(
        server, sample_body(sampler_id, 1, sampling_params={"max_tokens": 30, "seed": 3, "stop": [third]})
    )
    cut = endless.sequences[0].tokens.index(third) + 1
    assert as_drawn(stopped.sequences[0]) == as_drawn(endless.sequences[0])[:cut]
    assert stopped.sequences[0].stop_reason == "stop"


LIKELY_END = {"max_tokens": 30, "seed": 3, "logit_bias": {str(END): 5.0}}
"""The model's end token is likely, but not at once."""


def drawn_tokens(answer: Any) -> Drawn:
    return as_drawn(answer.sequences[0])


async def test_stops_are_added_to_the_end_tokens_and_only_an_empty_list_removes_them(server: Server) -> None:
    sampler_id = await base_sampler(server)
    endless = drawn_tokens(await sample(server, sample_body(sampler_id, 0, sampling_params=LIKELY_END | {"stop": []})))
    end = endless.index(END)
    assert len(endless) == 30 and 1 < end < 29
    never = next(token for token in range(3, VOCAB) if token not in endless)
    cases = [(None, end), ([never], end), ([never, END], end), ([endless[end + 1]], end), ([endless[1], never], 1)]
    for seq_id, (stop, last) in enumerate(cases, 1):
        answer = await sample(server, sample_body(sampler_id, seq_id, sampling_params=LIKELY_END | {"stop": stop}))
        assert drawn_tokens(answer) == endless[: last + 1], stop
        assert answer.sequences[0].stop_reason == "stop"


async def test_a_sample_that_an_earlier_version_journaled_is_drawn_as_it_was_meant_then(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """There, the stops of a request replaced the model's end tokens."""
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        sampler_id = await base_sampler(server)
        endless = drawn_tokens(
            await sample(server, sample_body(sampler_id, 0, sampling_params=LIKELY_END | {"stop": []}))
        )
        sampler = server.services.samplers.find(sampler_id)
        assert sampler is not None
    end, later = endless.index(END), endless[-1]
    cases = [None, [later], []]
    lengths = [end + 1, endless.index(later) + 1, 30]
    assert endless.index(later) > end
    journal = SegmentLog(tmp_path / "journal", 1 << 20)
    for seq_id, stop in enumerate(cases, 1):
        body = sample_body(sampler_id, seq_id, sampling_params=LIKELY_END | {"stop": stop})
        header = {"kind": "sample", "tenant_id": sampler.record.tenant_id, "run_id": sampler_id, "seq_id": seq_id}
        header |= {"request_id": f"{sampler_id}:{seq_id}", "version": 1}
        await journal.append(header, json.dumps(body).encode())
    await journal.close()
    async with running_server(config, dispatch) as restarted:
        for seq_id, length in enumerate(lengths, 1):
            answer = await restarted.result(f"{sampler_id}:{seq_id}")
            assert answer["sequences"][0]["tokens"] == endless[:length], cases[seq_id - 1]


async def test_seq_ids_of_the_plain_route_may_be_omitted(server: Server) -> None:
    sampler_id = await base_sampler(server)
    body = {"sampling_session_id": sampler_id, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}}
    body["sampling_params"] = {"max_tokens": 2, "stop": []}
    assert [(await server.post("sample", body))["seq_id"] for _ in range(3)] == [0, 1, 2]
    waited = await server.post("sample", body, Prefer="wait=20")
    assert len(waited["sequences"][0]["tokens"]) == 2


async def test_a_request_may_name_weights_instead_of_a_sampler(server: Server) -> None:
    run = await trained_run(server)
    path = (await run.do("save_weights_for_sampler", path="one-shot"))["path"]
    body = sample_body("") | {"sampling_session_id": None, "seq_id": None}
    trained = [await server.post("sample", body | {"model_path": path}) for _ in range(2)]
    assert trained[0]["request_id"] != trained[1]["request_id"]
    session_id = trained[0]["request_id"].partition(":")[0]
    assert trained[1]["request_id"].startswith(session_id), "one sampler serves both requests"
    sampler = {"session_id": run.session_id, "sampling_session_seq_id": 3, "model_path": path}
    sampler_id = (await server.post("create_sampling_session", sampler))["sampling_session_id"]
    expected = await sample(server, sample_body(sampler_id))
    for submitted in trained:
        sequences = (await server.result(submitted["request_id"]))["sequences"]
        assert as_drawn(sequences[0]) == as_drawn(expected.sequences[0])
    of_base = await server.post("sample", body | {"base_model": MODEL}, Prefer="wait=20")
    assert of_base["sequences"][0]["logprobs"] != pytest.approx(expected.sequences[0].logprobs, abs=1e-3)
    await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}}, status=204)
    again = await server.post("sample", body | {"model_path": path}, Prefer="wait=20")
    assert as_drawn(again["sequences"][0]) == as_drawn(expected.sequences[0]), (
        "its session may end: a new one is created"
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "sampling_session_id is missing"),
        ({"base_model": MODEL, "seq_id": 1}, "seq_id 1 without sampling_session_id"),
        ({"base_model": "gpt-5"}, "gpt-5"),
        ({"base_model": MODEL, "model_path": "tinker://x"}, "'tinker://x' is not a checkpoint path"),
    ],
)
async def test_a_refused_request_for_weights_opens_no_session(server: Server, fields: dict, reason: str) -> None:
    before = (await server.clients["tml-alice"].get("sessions?limit=1000")).json()
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}} | fields
    assert reason in (await server.post("sample", body, status=400))["detail"]
    assert (await server.clients["tml-alice"].get("sessions?limit=1000")).json() == before


async def test_joining_counts_the_clients(server: Server) -> None:
    sampler_id = await base_sampler(server)
    counts = [await server.post("join_sampling_session", {"sampling_session_id": sampler_id}) for _ in range(2)]
    assert counts == [{"client_counter": 1}, {"client_counter": 2}]


@pytest.mark.slow
async def test_a_cancelled_request_fails_and_others_continue(server: Server) -> None:
    sampler_id = await base_sampler(server)
    params = {"max_tokens": 900, "stop": [], "seed": 1}
    long = [await server.post("asample", sample_body(sampler_id, seq_id, sampling_params=params)) for seq_id in (0, 1)]
    await server.post("cancel_future", {"request_id": long[0]["request_id"]}, status=204)
    answer = await server.result(long[0]["request_id"])
    assert "cancelled" in answer["error"]
    assert len((await server.result(long[1]["request_id"]))["sequences"][0]["tokens"]) == 900
    await server.post("cancel_future", {"request_id": long[1]["request_id"]}, status=204)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aGk=", "format": "png"}]}}, "'image'"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, VOCAB]}]}}, f"token {VOCAB}"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}, "token -1"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [0] * 1024}]}}, "1024 tokens"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**9}, "num_samples 1000000000"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"sampling_params": {"max_tokens": 1022}}, "max_tokens 1022 exceeds the 1021 tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n 3"),
        ({"topk_prompt_logprobs": VOCAB + 1}, f"topk_prompt_logprobs {VOCAB + 1}"),
        ({"target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [3, 1]}}, r"\[2, K\]"),
        ({"sampling_session_id": "nobody:sample:0"}, "no sampler nobody:sample:0"),
        ({"sampling_session_id": None}, "sampling_session_id is missing"),
        ({"seq_id": -4}, "seq_id"),
    ],
)
async def test_bad_requests_name_the_value_and_the_next_request_works(
    server: Server, fields: dict, reason: str
) -> None:
    sampler_id = await base_sampler(server)
    response = await server.clients["tml-alice"].post("asample", json=sample_body(sampler_id) | fields)
    assert response.status_code in (400, 404)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(response.json()["detail"])
    assert len((await sample(server, sample_body(sampler_id))).sequences) == 1


async def test_a_sampler_without_weights_or_of_an_unknown_model_is_refused(server: Server) -> None:
    session = {"session_id": await server.create_session(), "sampling_session_seq_id": 0}
    assert "base_model or model_path" in (await server.post("create_sampling_session", session, status=400))["detail"]
    unknown = await server.post("create_sampling_session", session | {"base_model": "gpt-5"}, status=400)
    assert "gpt-5" in unknown["detail"] and MODEL in unknown["detail"]
    bad_path = session | {"model_path": "tinker://../weights/x"}
    assert "checkpoint" in (await server.post("create_sampling_session", bad_path, status=404))["detail"]


async def test_sampling_a_deleted_checkpoint_fails_with_its_path(server: Server) -> None:
    run = await server.create_run()
    path = (await run.do("save_weights_for_sampler", path="soon-gone"))["path"]
    body = {"session_id": run.session_id, "sampling_session_seq_id": 9, "model_path": path}
    sampler_id = (await server.post("create_sampling_session", body))["sampling_session_id"]
    await server.clients[run.key].delete(f"training_runs/{run.model_id}/checkpoints/sampler_weights/soon-gone")
    submitted = await server.post("asample", sample_body(sampler_id))
    answer = await server.result(submitted["request_id"])
    assert answer["category"] == "user" and path in answer["error"]


async def test_checkpoint_and_base_samplers_work_after_a_restart(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        run = await trained_run(server)
        path = (await run.do("save_weights_for_sampler", path="kept"))["path"]
        body = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path}
        samplers = [(await server.post("create_sampling_session", body))["sampling_session_id"]]
        samplers.append(await base_sampler(server, run.session_id, 1))
        before = [await sample(server, sample_body(one)) for one in samplers]
    async with running_server(config, dispatch) as server:
        after = [await sample(server, sample_body(one, seq_id=1)) for one in samplers]
        unnumbered, other = await asyncio.gather(
            *(server.post("sample", sample_body(samplers[0], seq_id=None)) for _ in range(2))
        )
        kept = await server.result(f"{samplers[0]}:0")
    assert len({f"{samplers[0]}:0", unnumbered["request_id"], other["request_id"]}) == 3, (
        "the first id belongs to an earlier request"
    )
    assert as_drawn(kept["sequences"][0]) == as_drawn(before[0].sequences[0])
    for old, new in zip(before, after, strict=True):
        assert_same_sample(old.sequences[0], new.sequences[0], 1e-5)


async def test_one_poll_returns_all_finished_samples_in_order_and_once(server: Server) -> None:
    sampler_id = await base_sampler(server)
    target = {"sampling_session_id": sampler_id}
    nothing = await server.post("retrieve_futures", {"target": target, "timeout": 0})
    assert nothing["completions"] == []
    waiting = asyncio.create_task(server.post("retrieve_futures", {"target": target}))
    await server.post("asample", sample_body(sampler_id, 0))
    first = await waiting
    assert [one["request_id"] for one in first["completions"]] == [f"{sampler_id}:0"]
    assert first["completions"][0]["response_payload_uncompressed_size"] > 0
    repeated = await server.post("retrieve_futures", {"target": target, "timeout": 0})
    assert repeated == first, "a lost answer is sent again"
    no_tokenizer = sample_body(sampler_id, 1, sampling_params={"max_tokens": 4, "stop": ["x"]})
    await server.post("asample", no_tokenizer)
    second = await server.post("retrieve_futures", {"target": target, "prev_cursor": first["cursor"]})
    assert second["completions"] == [{"state": "failed", "request_id": f"{sampler_id}:1"}]
    clone = {"sampling_session_id": sampler_id, "cloned_sampler_id": 7}
    await server.post("asample", sample_body(sampler_id, 7_000_000_001))
    of_clone = await server.post("retrieve_futures", {"target": clone})
    assert [one["request_id"] for one in of_clone["completions"]] == [f"{sampler_id}:7000000001"]
    of_another_process = {"target": target, "prev_cursor": 99, "timeout": 0}
    assert (await server.post("retrieve_futures", of_another_process))["completions"] == second["completions"]
    await server.post("retrieve_futures", {"target": target, "timeout": 0}, key=BOB, status=404)


async def test_one_poll_returns_samples_finished_before_a_restart(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        sampler_id = await base_sampler(server)
        target = {"sampling_session_id": sampler_id}
        for seq_id in (0, 1):
            await server.post("asample", sample_body(sampler_id, seq_id))
        cursor, num_reported = 0, 0
        while num_reported < 2:
            polled = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor})
            cursor, num_reported = polled["cursor"], num_reported + len(polled["completions"])
        await sample(server, sample_body(sampler_id, 2))
        of_clone = await server.post("asample", sample_body(sampler_id, 1_000_000_000))
        await server.result(of_clone["request_id"])
    async with running_server(config, dispatch) as server:
        polled = await server.post("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0})
        assert f"{sampler_id}:2" in [one["request_id"] for one in polled["completions"]]
        assert of_clone["request_id"] not in [one["request_id"] for one in polled["completions"]]
        assert all(one["response_payload_uncompressed_size"] > 0 for one in polled["completions"])
        await server.post("asample", sample_body(sampler_id, 3))
        later = await server.post("retrieve_futures", {"target": target, "prev_cursor": polled["cursor"]})
        assert [one["request_id"] for one in later["completions"]] == [f"{sampler_id}:3"]


async def test_a_sample_that_crashes_workers_fails_at_the_third_crash_even_across_a_restart(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = asyncio.Semaphore(0)
    num_deaths = 0

    async def dies(*_: object) -> None:
        nonlocal num_deaths
        await deaths.acquire()
        num_deaths += 1
        raise WorkerLost("the worker died", alone=True)

    config = server_config(tiny_models["qwen3"], tmp_path)
    monkeypatch.setattr(dispatch, "sample", dies)
    async with running_server(config, dispatch) as server:
        sampler_id = await base_sampler(server)
        await server.post("asample", sample_body(sampler_id, 0))
        for _ in range(2):
            deaths.release()
        async with asyncio.timeout(30):
            while num_deaths < 2 or not deaths.locked():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    async with running_server(config, dispatch) as server:
        deaths.release()
        failed = await server.result(f"{sampler_id}:0")
        assert "died 3 times" in failed["error"] and num_deaths == 3


async def test_a_sample_fails_if_loading_its_adapter_crashes_the_worker(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise WorkerLost("the worker died", alone=True)

    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as server:
        run = await server.create_run()
        path = (await run.do("save_weights_for_sampler", path="a"))["path"]
        body = {"session_id": run.session_id, "sampling_session_seq_id": 0, "model_path": path}
        sampler_id = (await server.post("create_sampling_session", body))["sampling_session_id"]
        monkeypatch.setattr(dispatch, "load_adapter", dies)
        await server.post("asample", sample_body(sampler_id, 0))
        assert "died" in (await server.result(f"{sampler_id}:0"))["error"]
        monkeypatch.undo()
        assert (await sample(server, sample_body(sampler_id, 1))).sequences
