"""Exports spans by OTLP over HTTP, from a thread of its own. Only imported if traces are exported.

OpenTelemetry's exporter builds messages from its own classes of spans, which takes five times as long as writing into
the messages here does.
"""

import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from ..config.knob_values import ConfigError
from ..logs.repeated_errors import RepeatedErrorLog
from .export_settings import COMPRESSIONS, ExportSettings

logger = logging.getLogger(__name__)

_RETRIED = (429, 502, 503, 504)
"""Answers after which a collector may take the same request (specification of OTLP, failures over HTTP)."""
_FIRST_PAUSE_SECONDS = 1.0
"""Before the first retry; each later pause is twice as long."""
_KEPT_ATTRIBUTES = 2048


class SpanExport:
    """Takes spans from one thread, and posts them from another, so that a slow collector does not delay anything.

    Spans that the collector does not take in time, or that are too many, are dropped, which is logged.
    """

    def __init__(self, resource: Mapping[str, str], scope: str, version: str, settings: ExportSettings) -> None:
        """Begins the thread.

        Args:
            resource: attributes of the server. scope, version: name and version of what makes the spans.

        Raises:
            ConfigError: a certificate cannot be read.
        """
        self._settings = settings
        self._empty = ResourceSpans(
            resource=Resource(attributes=attributes_of(resource)),
            scope_spans=[ScopeSpans(scope=InstrumentationScope(name=scope, version=version))],
        )
        self._errors = RepeatedErrorLog(logger, f"exporting spans to {settings.url}")
        self._lock = threading.Lock()
        self._waiting: deque[ExportTraceServiceRequest] = deque()
        self._num_held, self._num_in_newest, self._num_dropped = 0, 0, 0  # held: waiting, or being posted
        self._has_request, self._closing = threading.Event(), threading.Event()
        self._client = _client(settings)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(
        self,
        name: str,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        times: tuple[float, float],
        attributes: Mapping[str, str | int],
        *,
        kind: Span.SpanKind.ValueType = Span.SPAN_KIND_INTERNAL,
        trace_state: str = "",
        flags: int = 0,
        status: Status | None = None,
        links: Iterable[Span.Link] = (),
    ) -> None:
        """Adds a span that has ended.

        Args:
            trace_id, span_id, parent_id: of 16, 8 and 8 bytes; a span without a parent has the parent b"".
            times: begin and end, in seconds since 1970.
        """
        began_at, ended_at = times
        with self._lock:
            if self._num_held >= self._settings.most_spans:
                self._num_dropped += 1
                return
            if not self._waiting or self._num_in_newest >= self._settings.spans_per_request:
                self._waiting.append(ExportTraceServiceRequest(resource_spans=[self._empty]))
                self._num_in_newest = 0
            self._num_held, self._num_in_newest = self._num_held + 1, self._num_in_newest + 1
            is_full = self._num_in_newest == self._settings.spans_per_request
            self._waiting[-1].resource_spans[0].scope_spans[0].spans.add(
                trace_id=trace_id,
                span_id=span_id,
                parent_span_id=parent_id,
                trace_state=trace_state,
                flags=flags,
                name=name,
                kind=kind,
                start_time_unix_nano=round(1e9 * began_at),
                end_time_unix_nano=round(1e9 * ended_at),
                attributes=attributes_of(attributes),
                links=links,
                status=status,
            )
        if is_full:
            self._has_request.set()

    def close(self, seconds: float) -> None:
        """Posts what waits, without retries, for at most so long. The thread does not keep the process from ending."""
        self._closing.set()
        self._has_request.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._client:
            while True:
                is_last = self._closing.is_set()
                while (request := self._take()) is not None:
                    self._post(self._encode(request))
                    with self._lock:
                        self._num_held -= len(request.resource_spans[0].scope_spans[0].spans)
                if is_last:
                    return
                self._has_request.wait(self._settings.delay_seconds)
                self._has_request.clear()

    def _take(self) -> ExportTraceServiceRequest | None:
        """Returns the oldest request, None if there is none."""
        with self._lock:
            request = self._waiting.popleft() if self._waiting else None
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            logger.warning("dropped %d spans: more were waiting than OTEL_BSP_MAX_QUEUE_SIZE", num_dropped)
        return request

    def _encode(self, request: ExportTraceServiceRequest) -> bytes:
        content, compression = request.SerializeToString(), self._settings.compression
        return content if compression is None else COMPRESSIONS[compression](content)

    def _post(self, content: bytes) -> None:
        """Posts a request; retries it while there is time for it."""
        until, pause = time.monotonic() + self._settings.timeout_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                response = self._client.post(self._settings.url, content=content)
            except httpx.HTTPError as error:
                reason, is_final = f"{type(error).__name__}: {error}", False
            else:
                if response.is_success:
                    self._errors.succeeded()
                    return
                reason, is_final = (
                    f"the collector answered {response.status_code}",
                    response.status_code not in _RETRIED,
                )
            if is_final or time.monotonic() + pause >= until or self._closing.wait(pause):
                self._errors.failed(OSError(f"{reason}; its spans are dropped"))
                return
            pause *= 2


def _client(settings: ExportSettings) -> httpx.Client:
    headers = {**dict(settings.headers), "Content-Type": "application/x-protobuf"}
    if settings.compression is not None:
        headers["Content-Encoding"] = settings.compression
    verify: ssl.SSLContext | bool = False
    if settings.url.startswith("https://"):
        try:
            verify = (
                ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else httpx.create_ssl_context()
            )
            if settings.certificate_file is not None:
                verify.load_cert_chain(settings.certificate_file, settings.key_file)
        except OSError as error:
            raise ConfigError(f"a certificate for the export of traces cannot be read: {error}") from None
    return httpx.Client(headers=headers, verify=verify, timeout=settings.timeout_seconds)


def attributes_of(values: Mapping[str, str | int]) -> list[KeyValue]:
    return [_attribute(name, value) for name, value in values.items()]


@lru_cache(maxsize=_KEPT_ATTRIBUTES)
def _attribute(name: str, value: str | int) -> KeyValue:
    return KeyValue(
        key=name, value=AnyValue(string_value=value) if isinstance(value, str) else AnyValue(int_value=value)
    )
