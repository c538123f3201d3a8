"""Makes spans from what the parts of a server report. Only imported if traces are exported.

A request's span has those of the operations that it brings below it; an operation's has the time for which it was
queued, and the calls of the ranks that held it, each with a span of every rank. A call of several operations belongs to
the trace of the first; the spans of the others link to it.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...schemas.version import VERSION
from ...workers.protocol.work_context import WorkContext
from ...workers.scheduler.rank_calls import EndedCall
from ...workers.scheduler.work import AwaitedWork, SamplingWork
from ..store import OperationRecord
from .ended_sample import EndedSample
from .export_settings import ExportSettings
from .span_export import SpanExport

_SERVICE = "trainhouse"
_HEADERS = ("traceparent", "tracestate")
_HERE = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_BELOW_REMOTE = _HERE | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK

_Attributes = Mapping[str, str | int]


@dataclass(slots=True, eq=False)
class _Trace:
    """The properties that the spans of one trace in this process share.

    client: what the request's headers say of the client's span; None if they do not.
    is_exported, state: decided when the first of its spans has ended; None and "" before.
    """

    id: int
    client: Context | None = None
    is_exported: bool | None = None
    state: str = ""

    @property
    def id_bytes(self) -> bytes:
        return self.id.to_bytes(16, "big")


@dataclass(slots=True, eq=False)
class _Span:
    """A span, from its beginning to its export.

    parent: its parent in this process, None for the first span of a trace.
    attributes: of a first span, for the sampler. began_at: in seconds since 1970.
    is_sliced: a slice of its sample was exported.
    """

    name: str
    kind: Span.SpanKind.ValueType
    trace: _Trace
    parent: "_Span | None"
    attributes: _Attributes
    id: bytes
    began_at: float
    is_sliced: bool = False


class Tracing:
    """Begins and ends spans; the span of a work's context is the parent of those below it.

    The sampler and the resource are set by the standard variables OTEL_*. The sampler is asked once for each trace.

    What begins is noted at once; what ended is reported later, from the backlog, and is written into the messages of
    the export without OpenTelemetry's classes of spans, whose checks and conversions take most of the time that a span
    would cost.
    """

    def __init__(self, settings: ExportSettings) -> None:
        """Begins to export spans.

        Raises:
            ConfigError: a certificate cannot be read.
        """
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE, SERVICE_VERSION: VERSION}))
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        attributes = {name: str(value) for name, value in resource.attributes.items()}
        self._export = SpanExport(attributes, _SERVICE, VERSION, settings)

    def close(self, seconds: float) -> None:
        """Exports what has ended, for at most so long."""
        self._export.close(seconds)

    def request_began(self, work: WorkContext, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Begins the span of a request, below that of the client if its headers name one (W3C Trace Context)."""
        attributes = {"http.request.method": method, "http.route": route.partition(" ")[2]}
        client = self._client(headers) if _HEADERS[0] in headers else None
        _begin_trace(work, route, Span.SPAN_KIND_SERVER, attributes, client)

    def request_ended(self, work: WorkContext, status: int, ended_at: float) -> None:
        reason = work.refusal if status >= 500 else None
        self._end(work, ended_at, {"http.response.status_code": status}, status >= 500, reason)

    def work_began(self, work: WorkContext, name: str) -> None:
        """Begins the span of an operation or of a sampling request, below that of the request that brought it."""
        if (request := _span(work)) is not None:
            work.span = _Span(name, Span.SPAN_KIND_INTERNAL, request.trace, request, {}, _new_id(), time.time())
        else:
            _begin_trace(work, name, Span.SPAN_KIND_INTERNAL, _ids(work), None)

    def operation_ended(self, work: WorkContext, ended: OperationRecord, reason: str | None) -> None:
        if (span := self._exported(work)) is None:
            return
        begun_at = ended.ended_at - ended.busy_seconds
        self._add(span.trace, span.id, "queued", begun_at - ended.queued_seconds, ended.queued_seconds)
        numbers = {"trainhouse.seq_id": ended.seq_id, "trainhouse.tokens": ended.num_tokens}
        numbers = numbers if ended.step is None else numbers | {"trainhouse.step": ended.step}
        self._end(work, ended.ended_at, numbers, reason is not None, reason)

    def sample_ended(self, work: WorkContext, ended: EndedSample) -> None:
        numbers = {"trainhouse.prompt_tokens": ended.prompt_tokens}
        numbers = numbers if ended.num_tokens is None else numbers | {"trainhouse.tokens": ended.num_tokens}
        self._end(work, ended.ended_at, numbers, ended.reason is not None, ended.reason)

    def call_ended(self, ended: EndedCall) -> None:
        """Adds a call of the ranks to the traces of the work in it; of slices, only the first of each sample."""
        above = [span for work in ended.call.works if (span := self._shows_calls(work)) is not None]
        if not above:
            return
        first, *others = above
        size, name = ended.call.size, ended.call.activity
        attributes = {
            "trainhouse.group": ended.group,
            "trainhouse.tokens": size.tokens,
            "trainhouse.operations": size.operations,
        }
        whole = self._add(first.trace, first.id, name, ended.began_at, ended.seconds, attributes)
        for rank, times in enumerate(ended.rank_times):
            numbers = {"trainhouse.rank": rank}
            self._add(first.trace, whole, f"rank {rank}", times.began_at, times.seconds, numbers)
        link = Span.Link(trace_id=first.trace.id_bytes, span_id=whole, flags=_HERE)
        for other in others:
            self._add(other.trace, other.id, name, ended.began_at, ended.seconds, attributes, link)

    def _client(self, headers: Mapping[str, str]) -> Context | None:
        """Returns the context with the client's span; None if the headers are malformed."""
        found = self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers}, Context())
        return found if _client_span(found).is_valid else None

    def _is_exported(self, span: _Span) -> bool:
        """Returns what the sampler says of the span's trace, which it is asked once."""
        trace = span.trace
        if trace.is_exported is None:
            while span.parent is not None:
                span = span.parent
            parent = trace.client or Context()
            decided = self._sampler.should_sample(parent, trace.id, span.name, attributes=span.attributes)
            trace.is_exported = decided.decision.is_sampled()
            trace.state = decided.trace_state.to_header() if decided.trace_state else ""
        return trace.is_exported

    def _exported(self, work: WorkContext) -> _Span | None:
        """Returns the work's span; None if it has none, or its trace is not exported."""
        span = _span(work)
        return span if span is not None and self._is_exported(span) else None

    def _shows_calls(self, work: AwaitedWork) -> _Span | None:
        """Returns the span below which a call with this work is shown; None if it is not."""
        if work.context is None or (span := _span(work.context)) is None:
            return None
        if isinstance(work, SamplingWork):
            if span.is_sliced:
                return None
            span.is_sliced = True
        return self._exported(work.context)

    def _end(
        self, work: WorkContext, ended_at: float, attributes: _Attributes, has_failed: bool, reason: str | None
    ) -> None:
        """Exports the work's span, if it has one that is exported."""
        if (span := self._exported(work)) is None:
            return
        client = None if span.trace.client is None or span.parent is not None else _client_span(span.trace.client)
        above = b"" if span.parent is None else span.parent.id
        self._export.add(
            span.name,
            span.trace.id_bytes,
            span.id,
            above if client is None else client.span_id.to_bytes(8, "big"),
            (span.began_at, ended_at),
            {**span.attributes, **_ids(work), **attributes},
            kind=span.kind,
            trace_state=span.trace.state,
            flags=_HERE if client is None else _BELOW_REMOTE,
            status=Status(code=Status.STATUS_CODE_ERROR, message=reason or "") if has_failed else None,
        )

    def _add(
        self,
        trace: _Trace,
        above: bytes,
        name: str,
        began_at: float,
        seconds: float,
        attributes: _Attributes | None = None,
        *links: Span.Link,
    ) -> bytes:
        """Exports a span of what has no WorkContext, and returns its id. began_at: in seconds since 1970."""
        span_id, times = _new_id(), (began_at, began_at + seconds)
        self._export.add(
            *(name, trace.id_bytes, span_id, above, times, attributes or {}),
            trace_state=trace.state,
            flags=_HERE,
            links=links,
        )
        return span_id


def _begin_trace(
    work: WorkContext, name: str, kind: Span.SpanKind.ValueType, attributes: _Attributes, client: Context | None
) -> None:
    """Begins the first span of a trace in this process."""
    trace = _Trace(random.getrandbits(128) if client is None else _client_span(client).trace_id, client)
    work.trace = f"{trace.id:032x}"
    work.span = _Span(name, kind, trace, None, attributes, _new_id(), time.time())


def _new_id() -> bytes:
    return random.getrandbits(64).to_bytes(8, "big")


def _client_span(client: Context) -> SpanContext:
    return get_current_span(client).get_span_context()


def _span(work: WorkContext) -> _Span | None:
    return work.span if isinstance(work.span, _Span) else None


def _ids(work: WorkContext) -> dict[str, str]:
    found = {"trainhouse.request": work.request, "trainhouse.tenant": work.tenant, "trainhouse.run": work.run}
    return {name: value for name, value in found.items() if value is not None}
