"""Makes spans of OpenTelemetry from what the parts of a server report. Only imported if traces are exported.

A request's span has those of the operations that it brings below it; an operation's has the time for which it was
queued, and the calls of the ranks that held it, each with a span of every rank. A call of several operations belongs to
the trace of the first; the spans of the others link to it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ... import __version__
from ...workers.protocol.work_context import WorkContext
from ...workers.scheduler.calls import EndedCall
from ...workers.scheduler.work import AnyWork, SamplingWork
from ..store import OperationRecord
from .server_metrics import EndedSample

_SERVICE = "trainhouse"
_HEADERS = ("traceparent", "tracestate")
_UNSET = Status()
_SCOPE = InstrumentationScope(_SERVICE, __version__)

_Attributes = Mapping[str, str | int]


@dataclass(slots=True, eq=False)
class _Span:
    """A span, from its beginning to its export.

    trace: the id of its trace, 32 hex digits. parent: its parent in this process, None for the first span of a trace.
    client: of a first span, what the request's headers say of the client's span; None if they do not.
    attributes: of a first span, for the sampler. began_at: in seconds since 1970.
    context, below: its identity for OpenTelemetry and that of its parent, None until they are needed.
    is_sliced: a slice of its sample was exported.
    """

    name: str
    kind: SpanKind
    trace: str
    parent: "_Span | None"
    client: Context | None
    attributes: _Attributes
    began_at: float
    context: SpanContext | None = None
    below: SpanContext | None = None
    is_sliced: bool = False


class _Resource(Resource):
    """The server's resource, which the exporter looks up for each span: the hash of its base class makes JSON of it."""

    __hash__ = object.__hash__


class Tracing:
    """Begins and ends spans; the span of a work's context is the parent of those below it.

    The sampler and the resource are set by the standard variables OTEL_*. The sampler is asked once for each trace.

    What begins is noted at once; what ended is reported later, from the backlog, where spans are made. They reach the
    processor without OpenTelemetry's class of open ones: its locks and checks take most of the time that a span costs,
    and each span here has one writer.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE, SERVICE_VERSION: __version__}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._resource = _Resource(resource.attributes, resource.schema_url)
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._processor = processor
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Exports what has ended. Takes as long as the exporter: at most its timeout."""
        self._processor.shutdown()

    def request_began(self, work: WorkContext, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Begins the span of a request, below that of the client if its headers name one (W3C Trace Context)."""
        attributes = {"http.request.method": method, "http.route": route.partition(" ")[2]}
        client = self._client(headers) if _HEADERS[0] in headers else None
        self._begin_trace(work, route, SpanKind.SERVER, attributes, client)

    def request_ended(self, work: WorkContext, status: int, ended_at: float) -> None:
        reason = work.refusal if status >= 500 else None
        self._end(work, ended_at, {"http.response.status_code": status}, status >= 500, reason)

    def work_began(self, work: WorkContext, name: str) -> None:
        """Begins the span of an operation or of a sampling request, below that of the request that brought it."""
        if (request := _span(work)) is not None:
            work.span = _Span(name, SpanKind.INTERNAL, request.trace, request, None, {}, time.time())
        else:
            self._begin_trace(work, name, SpanKind.INTERNAL, _ids(work), None)

    def operation_ended(self, work: WorkContext, ended: OperationRecord, reason: str | None) -> None:
        if (context := self._exported(work)) is None:
            return
        begun_at = ended.ended_at - ended.busy_seconds
        self._add(context, "queued", begun_at - ended.queued_seconds, ended.queued_seconds)
        numbers = {"trainhouse.seq_id": ended.seq_id, "trainhouse.tokens": ended.num_tokens}
        numbers = numbers if ended.step is None else numbers | {"trainhouse.step": ended.step}
        self._end(work, ended.ended_at, numbers, reason is not None, reason)

    def sample_ended(self, work: WorkContext, ended: EndedSample) -> None:
        numbers = {"trainhouse.prompt_tokens": ended.prompt_tokens}
        numbers = numbers if ended.num_tokens is None else numbers | {"trainhouse.tokens": ended.num_tokens}
        self._end(work, ended.ended_at, numbers, ended.reason is not None, ended.reason)

    def call_ended(self, ended: EndedCall) -> None:
        """Adds a call of the ranks to the traces of the work in it; of slices, only the first of each sample."""
        below = [context for work in ended.call.works if (context := self._shows_calls(work)) is not None]
        if not below:
            return
        first, *others = below
        size, name = ended.call.size, ended.call.activity
        attributes = {
            "trainhouse.group": ended.group,
            "trainhouse.tokens": size.tokens,
            "trainhouse.operations": size.operations,
        }
        whole = self._add(first, name, ended.began_at, ended.seconds, attributes)
        for rank, times in enumerate(ended.rank_times):
            self._add(whole, f"rank {rank}", times.began_at, times.seconds, {"trainhouse.rank": rank})
        links = [Link(whole)]
        for other in others:
            self._add(other, name, ended.began_at, ended.seconds, attributes, links)

    def _client(self, headers: Mapping[str, str]) -> Context | None:
        """Returns the context with the client's span; None if the headers are malformed."""
        found = self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers}, Context())
        return found if get_current_span(found).get_span_context().is_valid else None

    def _begin_trace(
        self, work: WorkContext, name: str, kind: SpanKind, attributes: _Attributes, client: Context | None
    ) -> None:
        """Begins the first span of a trace in this process."""
        known = None if client is None else get_current_span(client).get_span_context().trace_id
        work.trace = format_trace_id(known or self._ids.generate_trace_id())
        work.span = _Span(name, kind, work.trace, None, client, attributes, time.time())

    def _context(self, span: _Span) -> SpanContext:
        """Returns the span's identity, of which the flags say whether its trace is exported."""
        if span.context is None:
            below = self._root(span) if span.parent is None else self._context(span.parent)
            span.context, span.below = self._below(below), below if below.is_valid else None
        return span.context

    def _root(self, span: _Span) -> SpanContext:
        """Returns the parent of a trace's first span in this process: the client's span, or none in a new trace."""
        parent = span.client or Context()
        client, trace_id = get_current_span(parent).get_span_context(), int(span.trace, 16)
        decided = self._sampler.should_sample(parent, trace_id, span.name, attributes=span.attributes)
        flags = TraceFlags(TraceFlags.SAMPLED if decided.decision.is_sampled() else TraceFlags.DEFAULT)
        return SpanContext(trace_id, client.span_id, client.is_remote, flags, decided.trace_state)

    def _below(self, parent: SpanContext) -> SpanContext:
        """Returns a new span's context, with its parent's trace, flags and state."""
        span_id = self._ids.generate_span_id()
        return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)

    def _exported(self, work: WorkContext) -> SpanContext | None:
        """Returns the identity of the work's span; None if it has none, or its trace is not exported."""
        context = None if (span := _span(work)) is None else self._context(span)
        return context if context is not None and context.trace_flags.sampled else None

    def _shows_calls(self, work: AnyWork) -> SpanContext | None:
        """Returns the identity of the span below which a call with this work is shown; None if it is not."""
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
        if (context := self._exported(work)) is not None and (span := _span(work)) is not None:
            attributes = {**span.attributes, **_ids(work), **attributes}
            status = Status(StatusCode.ERROR, reason) if has_failed else _UNSET
            self._send(span.name, context, span.below, (span.began_at, ended_at), attributes, span.kind, status)

    def _add(
        self,
        below: SpanContext,
        name: str,
        began_at: float,
        seconds: float,
        attributes: _Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        """Exports a span of what has no WorkContext; times are in seconds since 1970."""
        context, times = self._below(below), (began_at, began_at + seconds)
        self._send(name, context, below, times, attributes or {}, links=links)
        return context

    def _send(
        self,
        name: str,
        context: SpanContext,
        below: SpanContext | None,
        times: tuple[float, float],
        attributes: _Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
        links: Sequence[Link] = (),
    ) -> None:
        began_at, ended_at = times
        span = ReadableSpan(
            name,
            context,
            below,
            self._resource,
            attributes,
            links=links,
            kind=kind,
            status=status,
            start_time=_nanoseconds(began_at),
            end_time=_nanoseconds(ended_at),
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(span)


def _span(work: WorkContext) -> _Span | None:
    return work.span if isinstance(work.span, _Span) else None


def _ids(work: WorkContext) -> dict[str, str]:
    found = {"trainhouse.request": work.request, "trainhouse.tenant": work.tenant, "trainhouse.run": work.run}
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
