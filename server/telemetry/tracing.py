"""Makes spans of OpenTelemetry from what the parts of a server report. Only imported if traces are exported.

A request's span has those of the operations that it brings below it; an operation's has the time for which it was
queued, and the calls of the ranks that held it, each with a span of every rank. A call of several operations belongs to
the trace of the first; the spans of the others link to it.
"""

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...schemas.version import VERSION
from ...workers.protocol.work_context import WorkContext
from ...workers.scheduler.rank_calls import EndedCall
from ...workers.scheduler.work import AwaitedWork, SamplingWork
from ..store import OperationRecord

_SERVICE = "trainhouse"
_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Begins and ends spans; the span of a work's context is the parent of those below it.

    The sampler, the limits of spans and the resource are set by the standard variables OTEL_*.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        named = Resource.create()
        if str(named.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            named = named.merge(Resource({SERVICE_NAME: _SERVICE, SERVICE_VERSION: VERSION}))
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_SERVICE, VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Exports what has ended. Takes as long as the exporter: at most its timeout."""
        self._provider.shutdown()

    def request_began(self, work: WorkContext, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Begins the span of a request, below that of the client if its headers name one (W3C Trace Context)."""
        parent = self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers})
        attributes = {"http.request.method": method, "http.route": route.partition(" ")[2]}
        self._begin(work, route, parent, attributes, SpanKind.SERVER)

    def request_ended(self, work: WorkContext, status: int) -> None:
        span = _span(work)
        if span is None or not span.is_recording():
            return
        span.set_attributes({"http.response.status_code": status, **_ids(work)})
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, work.refusal))
        span.end()

    def work_began(self, work: WorkContext, name: str) -> None:
        """Begins the span of an operation or of a sampling request, below that of the request that brought it."""
        self._begin(work, name, _below(work), _ids(work), SpanKind.INTERNAL)

    def operation_ended(self, work: WorkContext, ended: OperationRecord, reason: str | None) -> None:
        span = _span(work)
        if span is None or not span.is_recording():
            return
        begun_at = ended.ended_at - ended.busy_seconds
        self._add(work, "queued", begun_at - ended.queued_seconds, ended.queued_seconds)
        numbers = {"trainhouse.seq_id": ended.seq_id, "trainhouse.tokens": ended.num_tokens}
        span.set_attributes(numbers if ended.step is None else numbers | {"trainhouse.step": ended.step})
        _end(span, reason)

    def sample_ended(self, work: WorkContext, prompt_tokens: int, num_tokens: int | None, reason: str | None) -> None:
        span = _span(work)
        if span is None or not span.is_recording():
            return
        span.set_attribute("trainhouse.prompt_tokens", prompt_tokens)
        if num_tokens is not None:
            span.set_attribute("trainhouse.tokens", num_tokens)
        _end(span, reason)

    def call_ended(self, ended: EndedCall) -> None:
        """Adds a call of the ranks to the traces of the work in it; of slices, only the first of each sample."""
        works = [work.context for work in ended.call.works if work.context is not None and _is_traced(work)]
        if not works:
            return
        first, *others = works
        size, name = ended.call.size, ended.call.activity
        attributes = {
            "trainhouse.group": ended.group,
            "trainhouse.tokens": size.tokens,
            "trainhouse.operations": size.operations,
        }
        whole = self._add(first, name, ended.began_at, ended.seconds, attributes)
        for rank, time in enumerate(ended.rank_times):
            of_rank = {"trainhouse.rank": rank}
            self._add(WorkContext(span=whole), f"rank {rank}", time.began_at, time.seconds, of_rank)
        links = [Link(whole.get_span_context())]
        for other in others:
            self._add(other, name, ended.began_at, ended.seconds, attributes, links)

    def _begin(
        self,
        work: WorkContext,
        name: str,
        parent: Context,
        attributes: Mapping[str, str],
        kind: SpanKind,
    ) -> None:
        span = self._tracer.start_span(name, parent, kind, attributes)
        work.span, work.trace = span, format_trace_id(span.get_span_context().trace_id)

    def _add(
        self,
        below: WorkContext,
        name: str,
        began_at: float,
        seconds: float,
        attributes: Mapping[str, str | int] | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """Adds a span that has ended; times are in seconds since 1970."""
        began = _nanoseconds(began_at)
        span = self._tracer.start_span(name, _below(below), attributes=attributes, links=links, start_time=began)
        span.end(began + _nanoseconds(seconds))
        return span


def _span(work: WorkContext) -> Span | None:
    return work.span if isinstance(work.span, Span) else None


def _below(work: WorkContext) -> Context:
    span = _span(work)
    return Context() if span is None else set_span_in_context(span, Context())


def _is_traced(work: AwaitedWork) -> bool:
    if isinstance(work, SamplingWork) and work.num_slices > 0:
        return False
    span = None if work.context is None else _span(work.context)
    return span is not None and span.get_span_context().trace_flags.sampled


def _ids(work: WorkContext) -> dict[str, str]:
    found = {"trainhouse.request": work.request, "trainhouse.tenant": work.tenant, "trainhouse.run": work.run}
    return {name: value for name, value in found.items() if value is not None}


def _end(span: Span, reason: str | None) -> None:
    if reason is not None:
        span.set_status(Status(StatusCode.ERROR, reason))
    span.end()


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
