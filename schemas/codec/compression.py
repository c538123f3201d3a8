"""zstd decompression within a limit. zstandard is not in the bare client install, so it is imported where it is
used.
"""

from collections.abc import Iterator
from types import ModuleType

from ..errors import RequestError
from .formats import show_value

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SLICE_BYTES = 1024
"""Input per decompressor call: 1 KiB expands to at most 32 MiB, so a bomb is stopped early."""


def decompress(body: bytes, content_encoding: str | None, limit_bytes: int) -> bytes:
    """Returns the body without its Content-Encoding (none, identity or zstd), at most `limit_bytes`.

    Raises:
        RequestError: 400 truncated or corrupt, 413 over the limit, 415 another encoding.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        if len(body) > limit_bytes:
            raise RequestError(f"the body has {len(body)} bytes; the limit is {limit_bytes}", 413)
        return body
    if encoding == "zstd":
        return b"".join(_limited_pieces(body, limit_bytes))
    raise RequestError(f"content encoding {show_value(encoding)} is not supported: send zstd or none", 415)


def decompressed_size(body: bytes, content_encoding: str | None, limit_bytes: int) -> int:
    """Returns the size in bytes of the decompressed body without allocating memory for it.

    The size is the one that the zstd frame declares, or counted if it declares none; len(body) for other encodings,
    which `decompress` may refuse. Raises RequestError 413 if a zstd body is too large.
    """
    if (content_encoding or "").strip().lower() != "zstd":
        return len(body)
    if (declared := _declared_size(body)) is None:
        return sum(map(len, _limited_pieces(body, limit_bytes)))
    if declared > limit_bytes:
        raise _too_large(limit_bytes)
    return declared


def _limited_pieces(body: bytes, limit_bytes: int) -> Iterator[bytes]:
    """Yields no more than the frame declares, since zstd itself notices a wrong size only at the frame's end."""
    declared = _declared_size(body)
    size = 0
    for piece in _zstd_pieces(body):
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if declared is not None and size > declared:
            raise RequestError(f"the body is not valid zstd: it has more than the {declared} bytes that it declares")
        yield piece


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(f"the body has more than {limit_bytes} bytes once decompressed, which is the limit", 413)


def _declared_size(body: bytes) -> int | None:
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return None  # decompressing it raises an error that names the problem
    return size if size >= 0 else None


def decompressed_prefix(prefix: bytes, limit_bytes: int) -> bytes:
    """Returns at most `limit_bytes` from the beginning of a truncated or corrupt zstd body."""
    pieces: list[bytes] = []
    try:
        for piece in _zstd_pieces(prefix):
            pieces.append(piece)
            if sum(map(len, pieces)) > limit_bytes:
                break
    except RequestError:
        pass  # truncated or corrupt; return what was decompressed before
    return b"".join(pieces)[:limit_bytes]


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    """Yields the content of the one frame in `body`. Raises RequestError if it is anything else."""
    zstandard = _zstandard()
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(body), _SLICE_BYTES):
            if frame.eof:
                break
            yield frame.decompress(body[start : start + _SLICE_BYTES])
            end = min(start + _SLICE_BYTES, len(body))
            if frame.eof and (frame.unused_data or end < len(body)):
                raise RequestError("the zstd body has data after its frame: send one frame")
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd: {error}") from None
    if not frame.eof:
        raise RequestError(f"the zstd body is truncated after {len(body)} bytes")


def _zstandard() -> ModuleType:
    try:
        import zstandard  # not in the bare client install
    except ImportError:
        raise RequestError("this server cannot read zstd: send the body uncompressed", 415) from None
    return zstandard
