"""Decides by the standard variables OTEL_* whether a server exports traces, and opens the export by OTLP over HTTP."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..config.option_values import ConfigError

if TYPE_CHECKING:
    from .tracing import Tracing

_ENDPOINT = "http://localhost:4318"
_PROTOCOL = "http/protobuf"
_FLUSH_SECONDS = 5.0
"""Time at shutdown for the export of the last spans; a collector that does not respond gets no more."""


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Returns True if the variables name a collector, or the exporter otlp.

    Raises:
        ConfigError: they ask for an exporter or a protocol that the server does not have, or a value is invalid.
    """
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(environment.get, endpoints)) else "none")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}: the server exports traces by otlp, or none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environment.get(name)) not in (None, "", _PROTOCOL):
            raise ConfigError(f"{name} is {protocol!r}: the server exports by {_PROTOCOL}, to port 4318 of collectors")
    for name in endpoints:
        if not (endpoint := environment.get(name) or _ENDPOINT).startswith(("http://", "https://")):
            raise ConfigError(f"{name} is {endpoint!r}: give a URL, such as {_ENDPOINT}")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError("variables OTEL_* ask for traces, which need a package: pip install 'trainhouse[otel]'")
    return True


@contextlib.asynccontextmanager
async def opened_tracing(environment: Mapping[str, str]) -> AsyncIterator["Tracing | None"]:
    """Yields the tracing of the process, None if no traces are exported; exports the last spans at the end.

    Raises:
        ConfigError: as wants_traces.
    """
    if not wants_traces(environment):
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from .tracing import Tracing

    tracing = Tracing(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield tracing
    finally:
        # In a daemon thread, so that an export that hangs does not keep the process from ending.
        closing = threading.Thread(target=tracing.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _FLUSH_SECONDS)
