"""Decides by the standard variables OTEL_* whether a server exports traces, and opens the export by OTLP over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..config.knob_values import ConfigError
from .export_settings import ExportSettings

if TYPE_CHECKING:
    from .tracing import Tracing

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
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.proto") is None:
        raise ConfigError("variables OTEL_* ask for traces, which need a package: pip install 'trainhouse[otel]'")
    ExportSettings.read(environment)
    return True


@contextlib.asynccontextmanager
async def opened_tracing(environment: Mapping[str, str]) -> AsyncIterator["Tracing | None"]:
    """Yields the tracing of the process, None if no traces are exported; exports the last spans at the end.

    Raises:
        ConfigError: as wants_traces, or a certificate cannot be read.
    """
    if not wants_traces(environment):
        yield None
        return
    from .tracing import Tracing

    tracing = Tracing(ExportSettings.read(environment))
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close, _FLUSH_SECONDS)
