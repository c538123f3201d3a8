"""Settings of the export of traces: the standard variables OTEL_EXPORTER_OTLP_* and OTEL_BSP_*."""

import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from ..config.knob_values import ConfigError

COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
"""Functions by their name in the header Content-Encoding."""
_NO_COMPRESSION = "none"
_FOR_ALL, _FOR_TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
_COLLECTOR = "http://localhost:4318"


@dataclass(frozen=True)
class ExportSettings:
    """Says where spans are posted, and how many at a time.

    compression: a key of COMPRESSIONS; None: none.
    ca_file: certificates that the collector's is checked with; None: those of certifi.
    certificate_file, key_file: the server's own, if the collector asks for one.
    timeout_seconds: time for one request, with its retries.
    delay_seconds: a span waits for so long at most, to be posted with others.
    most_spans: how many wait at most while the collector does not take any; further ones are dropped.
    """

    url: str = f"{_COLLECTOR}/v1/traces"
    headers: tuple[tuple[str, str], ...] = ()
    compression: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    timeout_seconds: float = 10.0
    delay_seconds: float = 5.0
    most_spans: int = 2048
    spans_per_request: int = 512

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "ExportSettings":
        """Returns what the variables say; those for traces take precedence.

        Raises:
            ConfigError: a variable has an invalid value.
        """

        def of_exporter(name: str) -> str | None:
            return environment.get(_FOR_TRACES + name) or environment.get(_FOR_ALL + name) or None

        base = environment.get(f"{_FOR_ALL}ENDPOINT") or _COLLECTOR
        url = environment.get(f"{_FOR_TRACES}ENDPOINT") or f"{base.removesuffix('/')}/v1/traces"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the endpoint of traces is {url!r}: give a URL, such as {_COLLECTOR}")
        compression = of_exporter("COMPRESSION") or _NO_COMPRESSION
        if compression not in (*COMPRESSIONS, _NO_COMPRESSION):
            choices = ", ".join((*COMPRESSIONS, _NO_COMPRESSION))
            raise ConfigError(f"{_FOR_ALL}COMPRESSION is {compression!r}: choose one of {choices}")
        most_spans = int(_number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", cls.most_spans))
        per_request = int(_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", cls.spans_per_request))
        timeouts = {f"{prefix}TIMEOUT": environment.get(f"{prefix}TIMEOUT") for prefix in (_FOR_TRACES, _FOR_ALL)}
        timeout = next((name for name, value in timeouts.items() if value), f"{_FOR_ALL}TIMEOUT")
        return cls(
            url,
            headers=_headers(of_exporter("HEADERS") or ""),
            compression=None if compression == _NO_COMPRESSION else compression,
            ca_file=of_exporter("CERTIFICATE"),
            certificate_file=of_exporter("CLIENT_CERTIFICATE"),
            key_file=of_exporter("CLIENT_KEY"),
            timeout_seconds=_number(environment, timeout, cls.timeout_seconds),
            delay_seconds=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", 1000 * cls.delay_seconds) / 1000,
            most_spans=most_spans,
            spans_per_request=min(per_request, most_spans),
        )


def _headers(words: str) -> tuple[tuple[str, str], ...]:
    """Returns the headers of `name=value,...`, of which the values are encoded as in URLs."""
    pairs = [word.partition("=") for word in words.split(",") if word.strip()]
    if any(not name.strip() or not equals for name, equals, _ in pairs):
        raise ConfigError(f"{_FOR_ALL}HEADERS is malformed: give name=value, separated by commas")
    return tuple((name.strip().lower(), unquote(value.strip())) for name, _, value in pairs)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    words = environment.get(name)
    try:
        value = float(words) if words else default
    except ValueError:
        value = 0.0
    if not 1e-3 <= value < 1e9:
        raise ConfigError(f"{name} is {words!r}: give a positive number")
    return value
