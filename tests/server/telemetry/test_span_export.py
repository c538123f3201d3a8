"""SpanExport: spans reach a collector in time in bounded numbers, and a collector that fails harms no other part."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from trainhouse.server.config.knob_values import ConfigError
from trainhouse.server.telemetry import span_export
from trainhouse.server.telemetry.export_settings import ExportSettings
from trainhouse.server.telemetry.span_export import SpanExport

from .collector import Collector, running_collector

TRACE, SPAN = bytes(range(16)), b"\x01" * 8


@contextmanager
def running_export(collector: Collector, **settings: object) -> Iterator[SpanExport]:
    found = ExportSettings.read(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **{name: str(value) for name, value in settings.items()}}
    )
    export = SpanExport({"service.name": "ours"}, "scope", "1", found)
    try:
        yield export
    finally:
        export.close(20)


def add(export: SpanExport, name: str = "one", attributes: Mapping[str, str | int] = {}) -> None:
    export.add(name, TRACE, SPAN, b"", (1.5, 2.5), attributes)


def test_a_span_arrives_as_it_was_added() -> None:
    with running_collector() as collector:
        with running_export(collector) as export:
            add(export, "ä span", {"text": "ü", "number": -7, "zero": 0, "large": 1 << 40})
        [span] = collector.spans
    assert (span.name, span.service, span.trace_id, span.span_id) == ("ä span", "ours", TRACE.hex(), SPAN.hex())
    assert (span.start, span.end) == (1_500_000_000, 2_500_000_000) and not span.parent_id and not span.is_error
    assert span.attributes == {"text": "ü", "number": -7, "zero": 0, "large": 1 << 40}


def test_spans_wait_for_others_but_not_longer_than_the_delay() -> None:
    with running_collector() as collector, running_export(collector, OTEL_BSP_SCHEDULE_DELAY=300) as export:
        time.sleep(0.05)  # the thread waits
        for _ in range(5):
            add(export)
        time.sleep(0.05)
        assert not collector.spans
        assert len(collector.wait_for("one", 5)) == 5
        assert len(collector.headers) == 1


def test_a_full_request_is_posted_at_once_and_none_holds_more() -> None:
    with (
        running_collector() as collector,
        running_export(collector, OTEL_BSP_SCHEDULE_DELAY=60_000, OTEL_BSP_MAX_EXPORT_BATCH_SIZE=10) as export,
    ):
        time.sleep(0.05)
        for number in range(25):
            add(export, f"{number % 2}")
        collector.wait_for("0", 10)
        assert 20 <= len(collector.spans) < 30
    assert len(collector.headers) == 3 and len(collector.spans) == 25, "closing posts what waits"


def test_spans_beyond_the_limit_are_dropped_and_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with running_collector() as collector:
        collector.answers = iter([503])  # a retry follows after a second
        with running_export(collector, OTEL_BSP_SCHEDULE_DELAY=60_000, OTEL_BSP_MAX_QUEUE_SIZE=10) as export:
            for _ in range(200):
                add(export)
            assert export._num_held == 10
    assert not collector.spans, "closing does not wait for the retry"
    assert any(record.message.startswith("dropped 190 spans") for record in caplog.records)


@pytest.mark.parametrize("compression", ["gzip", "deflate", "none"])
def test_a_request_can_be_compressed(compression: str) -> None:
    with running_collector() as collector:
        with running_export(collector, OTEL_EXPORTER_OTLP_COMPRESSION=compression) as export:
            add(export)
        assert len(collector.spans) == 1
    assert collector.headers[0].get("Content-Encoding", "none") == compression


def test_an_unavailable_collector_gets_the_same_spans_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_FIRST_PAUSE_SECONDS", 0.05)
    with running_collector() as collector, running_export(collector, OTEL_BSP_SCHEDULE_DELAY=10) as export:
        collector.answers = iter([503, 429])
        add(export)
        assert len(collector.wait_for("one")) == 1
        assert len(collector.headers) == 3


def test_a_refused_request_is_not_repeated_and_later_spans_are_posted(caplog: pytest.LogCaptureFixture) -> None:
    with running_collector() as collector, running_export(collector, OTEL_BSP_SCHEDULE_DELAY=10) as export:
        collector.answers = iter([400])
        add(export, "refused")
        deadline = time.monotonic() + 20
        while export._num_held and time.monotonic() < deadline:
            time.sleep(0.01)
        add(export, "taken")
        assert len(collector.wait_for("taken")) == 1
        assert not collector.named("refused") and len(collector.headers) == 2
    first, second = (record.message for record in caplog.records if record.name == span_export.__name__)
    assert "the collector answered 400" in first and "works again" in second


def test_a_collector_that_does_not_run_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with running_collector() as collector:
        pass
    with running_export(collector) as export, caplog.at_level(logging.ERROR):
        add(export)
    [record] = [record for record in caplog.records if record.name == span_export.__name__]
    assert "ConnectError" in record.message and collector.url in record.message


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ExportSettings("http://localhost:4318/v1/traces")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://all/"}, ExportSettings("https://all/v1/traces")),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces/x"},
            ExportSettings("http://traces/x"),
        ),
        (
            {"OTEL_EXPORTER_OTLP_HEADERS": "Team = blue,key=a%20b%3D", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"},
            ExportSettings(headers=(("team", "blue"), ("key", "a b=")), timeout_seconds=3.0),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "3", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2"},
            ExportSettings(timeout_seconds=2.0),
        ),
        (
            {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_SCHEDULE_DELAY": "250"},
            ExportSettings(most_spans=100, spans_per_request=100, delay_seconds=0.25),
        ),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem"}, ExportSettings(ca_file="/ca.pem")),
    ],
)
def test_the_standard_variables_are_honoured(environment: dict[str, str], expected: ExportSettings) -> None:
    assert ExportSettings.read(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "'collector:4318/v1/traces': give a URL"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "secret"}, "HEADERS is malformed"),
        ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "'zstd': choose one of gzip, deflate, none"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE is 'many': give a positive number"),
        ({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "-1"}, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT is '-1'"),
    ],
)
def test_a_variable_that_cannot_be_understood_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExportSettings.read(environment)


def test_a_missing_certificate_is_refused_before_the_server_starts() -> None:
    settings = ExportSettings("https://collector/v1/traces", ca_file="/missing.pem")
    with pytest.raises(ConfigError, match="certificate"):
        SpanExport({}, "scope", "1", settings)
