"""Traces: from a request to the ranks, with an exporter in memory and with a collector that receives OTLP."""

import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import trainhouse
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trainhouse import AdamParams, Datum, SamplingParams
from trainhouse.server.config.option_values import ConfigError
from trainhouse.server.telemetry.open_tracing import opened_tracing, wants_traces
from trainhouse.server.telemetry.server_metrics import EndedSample
from trainhouse.server.telemetry.tracing import Tracing
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.work_context import WorkContext

from ...live import live_server
from ..real import ALICE, MODEL, PROTOBUF, Server, batch, running_server, sample_body, server_config
from .collector import Collector, ReceivedSpan, running_collector

pytestmark = pytest.mark.anyio

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans(InMemorySpanExporter):
    """Holds the spans of all that was reported when they are read, which the server may not have recorded yet."""

    catch_up: Callable[[], None]

    def get_finished_spans(self) -> tuple[ReadableSpan, ...]:
        self.catch_up()
        return super().get_finished_spans()

    def clear(self) -> None:
        self.catch_up()
        super().clear()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]

    def below(self, parent: ReadableSpan) -> Mapping[str, ReadableSpan]:
        own = span_id(parent)
        return {
            span.name: span
            for span in self.get_finished_spans()
            if span.parent is not None and span.parent.span_id == own
        }


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
async def traced(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, spans: Spans
) -> AsyncIterator[Server]:
    config, tracing = server_config(tiny_models["qwen3"], tmp_path / "state"), Tracing(SimpleSpanProcessor(spans))
    async with running_server(config, dispatch, tracing=tracing) as server:
        spans.catch_up = server.services.telemetry.catch_up
        yield server


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def is_within(inner: ReadableSpan, outer: ReadableSpan, slack_seconds: float = 0.002) -> bool:
    """True up to `slack_seconds`: times of operations are read from another clock."""
    assert inner.start_time and inner.end_time and outer.start_time and outer.end_time
    slack = 1e9 * slack_seconds
    return outer.start_time - slack <= inner.start_time <= inner.end_time <= outer.end_time + slack


@pytest.mark.slow
async def test_a_trace_leads_from_the_request_over_its_operation_and_pass_to_the_rank(
    traced: Server, spans: Spans
) -> None:
    run = await traced.create_run()
    response = await run.send(run.encode(batch(), 1), traceparent=f"00-{TRACE}-{CLIENT}-01")
    await traced.polled(response.json()["request_id"], accept=PROTOBUF)
    assert response.headers["x-trace-id"] == TRACE
    [request] = spans.named("POST /api/v1/forward_backward")
    assert trace_id(request) == TRACE and request.parent is not None and f"{request.parent.span_id:x}" == CLIENT
    assert request.attributes is not None and request.attributes["http.response.status_code"] == 200
    assert request.attributes["trainhouse.run"] == run.model_id
    operation = spans.below(request)["forward_backward"]
    assert operation.attributes is not None and operation.attributes["trainhouse.seq_id"] == 1
    parts = spans.below(operation)
    assert set(parts) == {"queued", "pass"} and all(is_within(part, operation) for part in parts.values())
    rank = spans.below(parts["pass"])["rank 0"]
    assert is_within(rank, parts["pass"]) and rank.end_time and rank.start_time and rank.end_time > rank.start_time
    assert {trace_id(span) for span in (operation, *parts.values(), rank)} == {TRACE}
    [created] = spans.named("create_model")
    assert "loading" in spans.below(created) and trace_id(created) != TRACE


@pytest.mark.slow
async def test_operations_of_one_pass_link_to_its_span(traced: Server, spans: Spans, dispatch: WorkerDispatch) -> None:
    runs = [await traced.create_run(number=number) for number in range(3)]
    [group] = dispatch.groups
    busy = await traced.create_run(number=9)
    spans.clear()
    # While the ranks work on a long pass, the others wait and share the next one.
    long = await busy.send(busy.encode(batch(40), 1))
    sent = [(run, (await run.send(run.encode(batch(), 1))).json()["request_id"]) for run in runs]
    for run, request_id in sent:
        await traced.polled(request_id, run.key, PROTOBUF)
    await traced.polled(long.json()["request_id"], accept=PROTOBUF)
    passes = spans.named("pass")
    assert len({trace_id(each) for each in passes}) == 4, "each operation has a span of its pass in its own trace"
    shared = [each for each in passes if each.links]
    assert shared, "no operations shared a pass"
    ranks = {span.parent.span_id for span in spans.named("rank 0") if span.parent is not None}
    for each in shared:
        [link] = each.links
        assert link.context.span_id in ranks and span_id(each) not in ranks
    assert group.name == MODEL


@pytest.mark.slow
async def test_a_sample_has_its_queue_and_first_slice_and_failures_are_errors(traced: Server, spans: Spans) -> None:
    run = await traced.create_run()
    sampler = await traced.post(
        "create_sampling_session", {"session_id": run.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    )
    submitted = await traced.post("asample", sample_body(sampler["sampling_session_id"]))
    await traced.result(submitted["request_id"])
    [sample] = spans.named("sample")
    assert "rank 0" in spans.below(spans.below(sample)["sampling"])
    assert sample.attributes is not None and sample.attributes["trainhouse.tokens"] == 4
    assert sample.status.is_ok
    assert "error" in await run.optim_step()
    [step] = spans.named("optim_step")
    assert not step.status.is_ok and "no gradients" in str(step.status.description)


@pytest.mark.slow
async def test_a_client_that_does_not_sample_its_trace_gets_no_spans(traced: Server, spans: Spans) -> None:
    run = await traced.create_run()
    spans.clear()
    response = await run.send(run.encode(batch(), 1), traceparent=f"00-{TRACE}-{CLIENT}-00")
    await traced.polled(response.json()["request_id"], accept=PROTOBUF)
    assert response.headers["x-trace-id"] == TRACE, "its lines in the log can be found"
    assert {span.name for span in spans.get_finished_spans()} == {"POST /api/v1/retrieve_future"}


@pytest.mark.parametrize(("sampler", "num_spans"), [("always_on", 50), ("always_off", 0)])
@pytest.mark.parametrize("name", ["", "parentbased_"])
def test_the_standard_variables_decide_which_traces_are_exported(
    monkeypatch: pytest.MonkeyPatch, name: str, sampler: str, num_spans: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name + sampler)
    assert len(spans_of_requests(50)) == num_spans


def test_a_part_of_all_traces_can_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    assert 120 < len(spans_of_requests(400)) < 280
    assert len(spans_of_requests(50, {"traceparent": f"00-{TRACE}-{CLIENT}-01"})) == 50, "the client has decided"


def spans_of_requests(number: int, headers: Mapping[str, str] = {}) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    for _ in range(number):
        work = WorkContext()
        tracing.request_began(work, "GET", "GET /api/v1/checkpoints", headers)
        assert work.trace is not None
        tracing.request_ended(work, 200, time.time())
    return exporter.get_finished_spans()


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "00-zz", f"00-{TRACE}-{CLIENT}-01-" + "9" * 1000, f"00-{'0' * 32}-{CLIENT}-01"])
async def test_a_malformed_traceparent_is_ignored(traced: Server, spans: Spans, header: str) -> None:
    response = await traced.clients[ALICE].get("checkpoints", headers={"traceparent": header, "tracestate": "=,=" * 99})
    assert response.status_code == 200 and response.headers["x-trace-id"] != TRACE
    [span] = spans.named("GET /api/v1/checkpoints")
    assert span.parent is None


@pytest.mark.slow
async def test_without_tracing_no_response_has_a_trace_id(server: Server) -> None:
    response = await server.clients[ALICE].get("checkpoints", headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"})
    assert response.status_code == 200 and "x-trace-id" not in response.headers


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fsdp=2"])
def test_a_server_exports_the_spans_of_its_process_and_ranks(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    data = [Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]
    options = {} if layout == "single" else {"parallel": layout}
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with live_server({MODEL: tiny_models["qwen3"]}, tmp_path / "state", **options) as server:
            monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
            with trainhouse.ServiceClient(server.url, "tml-me") as service:
                client = service.create_lora_training_client(MODEL, rank=4)
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(AdamParams(learning_rate=1e-3)).result()
                sampler = client.save_weights_and_get_sampling_client()
                sampler.sample([5, 6], 1, SamplingParams(max_tokens=2)).result()
            collector.wait_for("sample")
        assert collector.headers[0]["x-team"] == "blue"
        assert {span.service for span in collector.spans} == {"trainhouse"}
        for name, call in (("forward_backward", "pass"), ("optim_step", "step")):
            [operation] = collector.named(name)
            assert parent_of(collector, operation).name == f"POST /api/v1/{name}"
            ranks = collector.below(collector.below(operation)[call])
            assert set(ranks) == {f"rank {rank}" for rank in range(1 if layout == "single" else 2)}
            assert all(0 < span.end - span.start <= operation.end - operation.start for span in ranks.values())


def parent_of(collector: Collector, span: ReceivedSpan) -> ReceivedSpan:
    [parent] = [each for each in collector.spans if each.span_id == span.parent_id]
    return parent


async def test_a_collector_that_does_not_respond_delays_the_end_by_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainhouse.server.telemetry.open_tracing._FLUSH_SECONDS", 0.3)
    earlier = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with opened_tracing(os.environ) as tracing:
            assert tracing is not None
            work = WorkContext()
            tracing.work_began(work, "sample")
            tracing.sample_ended(work, EndedSample(MODEL, 1, 1, None, 0.1, time.time(), None))
            began_at = time.monotonic()
        assert 0.3 <= time.monotonic() - began_at < 3.0
    # The export's threads would log its failure during a later test.
    for thread in set(threading.enumerate()) - earlier:
        if thread.daemon:
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_decide_whether_traces_are_exported(environment: dict[str, str], wanted: bool) -> None:
    assert wants_traces(environment) == wanted


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf, to port 4318"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "give a URL, such as http://localhost:4318"),
    ],
)
def test_an_export_that_does_not_exist_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wants_traces(environment)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainhouse.server.telemetry.open_tracing.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainhouse\[otel\]'"):
        wants_traces({"OTEL_TRACES_EXPORTER": "otlp"})
