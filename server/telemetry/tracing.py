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

from ...schemas.version import VERSION
from ...workers.protocol.work_context import WorkContext
from ...workers.scheduler.rank_calls import EndedCall
from ...workers.scheduler.work import AwaitedWork, SamplingWork
from ..store import OperationRecord

_SERVICE = "trainhouse"
_HEADERS = ("traceparent", "tracestate")
_SCOPE = InstrumentationScope(_SERVICE, VERSION)

_Attributes = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class _OpenSpan:
    """A span that has not ended: began_at in seconds since 1970."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    kind: SpanKind
    attributes: _Attributes
    began_at: float


class Tracing:
    """Begins and ends spans; the span of a work's context is the parent of those below it.

    The sampler and the resource are set by the standard variables OTEL_*. The sampler is asked once for each trace.

    Spans reach the processor when they end, without OpenTelemetry's class of open ones: its locks and checks take most
    of the time that a span costs, and each span here has one writer.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE, SERVICE_VERSION: VERSION}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._resource, self._sampler, self._ids = resource, provider.sampler, provider.id_generator
        self._processor = processor
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Exports what has ended. Takes as long as the exporter: at most its timeout."""
        self._processor.shutdown()

    def request_began(self, work: WorkContext, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Begins the span of a request, below that of the client if its headers name one (W3C Trace Context)."""
        parent = self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers}, Context())
        attributes = {"http.request.method": method, "http.route": route.partition(" ")[2]}
        self._begin(work, route, self._root(route, parent, attributes), attributes, SpanKind.SERVER)

    def request_ended(self, work: WorkContext, status: int) -> None:
        reason = work.refusal if status >= 500 else None
        self._end(work, {"http.response.status_code": status, **_ids(work)}, status >= 500, reason)

    def work_began(self, work: WorkContext, name: str) -> None:
        """Begins the span of an operation or of a sampling request, below that of the request that brought it."""
        attributes, request = _ids(work), _span(work)
        below = self._root(name, Context(), attributes) if request is None else request.context
        self._begin(work, name, below, attributes, SpanKind.INTERNAL)

    def operation_ended(self, work: WorkContext, ended: OperationRecord, reason: str | None) -> None:
        begun_at = ended.ended_at - ended.busy_seconds
        if (span := _span(work)) is not None:
            self._add(span.context, "queued", begun_at - ended.queued_seconds, ended.queued_seconds)
        numbers = {"trainhouse.seq_id": ended.seq_id, "trainhouse.tokens": ended.num_tokens}
        numbers = numbers if ended.step is None else numbers | {"trainhouse.step": ended.step}
        self._end(work, numbers, reason is not None, reason)

    def sample_ended(self, work: WorkContext, prompt_tokens: int, num_tokens: int | None, reason: str | None) -> None:
        numbers = {"trainhouse.prompt_tokens": prompt_tokens}
        numbers = numbers if num_tokens is None else numbers | {"trainhouse.tokens": num_tokens}
        self._end(work, numbers, reason is not None, reason)

    def call_ended(self, ended: EndedCall) -> None:
        """Adds a call of the ranks to the traces of the work in it; of slices, only the first of each sample."""
        spans = [span for work in ended.call.works if (span := _traced(work)) is not None]
        if not spans:
            return
        first, *others = spans
        size, name = ended.call.size, ended.call.activity
        attributes = {
            "trainhouse.group": ended.group,
            "trainhouse.tokens": size.tokens,
            "trainhouse.operations": size.operations,
        }
        whole = self._add(first.context, name, ended.began_at, ended.seconds, attributes)
        for rank, times in enumerate(ended.rank_times):
            self._add(whole, f"rank {rank}", times.began_at, times.seconds, {"trainhouse.rank": rank})
        links = [Link(whole)]
        for other in others:
            self._add(other.context, name, ended.began_at, ended.seconds, attributes, links)

    def _root(self, name: str, parent: Context, attributes: _Attributes) -> SpanContext:
        """Returns what a trace's first span in this process is below: the client's span, or no span of a new trace.

        Its flags are as the sampler decides.
        """
        client = get_current_span(parent).get_span_context()
        trace_id = client.trace_id if client.is_valid else self._ids.generate_trace_id()
        decided = self._sampler.should_sample(parent, trace_id, name, attributes=attributes)
        flags = TraceFlags(TraceFlags.SAMPLED if decided.decision.is_sampled() else TraceFlags.DEFAULT)
        return SpanContext(trace_id, client.span_id, client.is_remote, flags, decided.trace_state)

    def _below(self, parent: SpanContext) -> SpanContext:
        """Returns a new span's context, with its parent's trace, flags and state."""
        span_id = self._ids.generate_span_id()
        return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)

    def _begin(self, work: WorkContext, name: str, below: SpanContext, attributes: _Attributes, kind: SpanKind) -> None:
        context, parent = self._below(below), below if below.is_valid else None
        work.span = _OpenSpan(name, context, parent, kind, attributes, time.time())
        work.trace = format_trace_id(context.trace_id)

    def _end(self, work: WorkContext, attributes: _Attributes, has_failed: bool, reason: str | None) -> None:
        """Ends the work's span, if it has one."""
        if (span := _span(work)) is None:
            return
        ended_at, status = time.time(), Status(StatusCode.ERROR, reason) if has_failed else Status()
        self._send(span, ended_at, {**span.attributes, **attributes}, status)

    def _add(
        self,
        below: SpanContext,
        name: str,
        began_at: float,
        seconds: float,
        attributes: _Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> SpanContext:
        """Adds a span that has ended; times are in seconds since 1970."""
        context = self._below(below)
        span = _OpenSpan(name, context, below, SpanKind.INTERNAL, attributes or {}, began_at)
        self._send(span, began_at + seconds, span.attributes, Status(), links)
        return context

    def _send(
        self,
        span: _OpenSpan,
        ended_at: float,
        attributes: _Attributes,
        status: Status,
        links: Sequence[Link] = (),
    ) -> None:
        if span.context.trace_flags.sampled:
            ended = ReadableSpan(
                span.name,
                span.context,
                span.parent,
                self._resource,
                attributes,
                links=links,
                kind=span.kind,
                status=status,
                start_time=_nanoseconds(span.began_at),
                end_time=_nanoseconds(ended_at),
                instrumentation_scope=_SCOPE,
            )
            self._processor.on_end(ended)


def _span(work: WorkContext) -> _OpenSpan | None:
    return work.span if isinstance(work.span, _OpenSpan) else None


def _traced(work: AwaitedWork) -> _OpenSpan | None:
    """Returns the span below which calls of the ranks are shown; None if its trace is not exported."""
    if work.context is None or (isinstance(work, SamplingWork) and work.num_slices > 0):
        return None
    span = _span(work.context)
    return span if span is not None and span.context.trace_flags.sampled else None


def _ids(work: WorkContext) -> dict[str, str]:
    found = {"trainhouse.request": work.request, "trainhouse.tenant": work.tenant, "trainhouse.run": work.run}
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
