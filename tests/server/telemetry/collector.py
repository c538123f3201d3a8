"""A collector of OpenTelemetry for tests: receives spans by OTLP over HTTP on a loopback port."""

import gzip
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as exported; times in nanoseconds. ids: of the trace, the span and its parent, in hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: Mapping[str, object]
    links: tuple[str, ...]
    service: str
    is_error: bool


class Collector:
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[Mapping[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers.append(dict(self.headers))
                collector.receive(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def receive(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                attributes = {each.key: each.value.string_value or each.value.int_value for each in span.attributes}
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                times = span.start_time_unix_nano, span.end_time_unix_nano
                links = tuple(link.span_id.hex() for link in span.links)
                service, is_error = names["service.name"], span.status.code == 2
                self.spans.append(ReceivedSpan(span.name, *ids, *times, attributes, links, service, is_error))

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: ReceivedSpan) -> dict[str, ReceivedSpan]:
        return {span.name: span for span in self.spans if span.parent_id == parent.span_id}

    def wait_for(self, name: str, number: int = 1) -> list[ReceivedSpan]:
        deadline = time.monotonic() + 20
        while len(self.named(name)) < number and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.named(name)


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
