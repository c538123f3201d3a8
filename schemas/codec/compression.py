"""zstd, within a limit. zstandard is not in the bare client install, so it is imported where it is used."""

from collections.abc import Iterator
from types import ModuleType

from ..errors import RequestError
from .invalid import shown

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SLICE_BYTES = 1024
"""Input given to the decompressor at a time: 1 KiB grows to 32 MiB at the most, so a bomb is stopped soon."""


def decompress(body: bytes, content_encoding: str | None, limit_bytes: int) -> bytes:
    """The body without its Content-Encoding (none, identity or zstd), of at most `limit_bytes`.

    Raises RequestError: 400 truncated or corrupt, 413 over the limit, 415 another encoding.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        if len(body) > limit_bytes:
            raise RequestError(f"the body has {len(body)} bytes; the limit is {limit_bytes}", 413)
        return body
    if encoding == "zstd":
        return b"".join(_limited_pieces(body, limit_bytes))
    raise RequestError(f"content encoding {shown(encoding)} is not supported: send zstd or none", 415)


def decompressed_size(body: bytes, content_encoding: str | None, limit_bytes: int) -> int:
    """Of the body without its Content-Encoding, in bytes, before any memory is taken for it.

    As a zstd frame declares it, else counted. Raises RequestError as `decompress`.
    """
    if (content_encoding or "").strip().lower() != "zstd":
        return len(body)
    if (declared := _declared_size(body)) is None:
        return sum(map(len, _limited_pieces(body, limit_bytes)))
    if declared > limit_bytes:
        raise _too_large(limit_bytes)
    return declared


def _limited_pieces(body: bytes, limit_bytes: int) -> Iterator[bytes]:
    """No more than the frame declares: a wrong size is noticed by zstd itself only at the frame's end."""
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
        return None  # decompressing it says what is wrong
    return size if size >= 0 else None


def decompressed_prefix(prefix: bytes, limit_bytes: int) -> bytes:
    """What a cut or broken zstd body begins with, of at most `limit_bytes`."""
    pieces: list[bytes] = []
    try:
        for piece in _zstd_pieces(prefix):
            pieces.append(piece)
            if sum(map(len, pieces)) > limit_bytes:
                break
    except RequestError:
        pass  # cut off or broken; what came before is what can be peeked at
    return b"".join(pieces)[:limit_bytes]


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    """What the one frame in `body` decompresses to. Raises RequestError on anything else."""
    zstandard = _zstandard()
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(body), _SLICE_BYTES):
            if frame.eof:
                break
            yield frame.decompress(body[start : start + _SLICE_BYTES])
            end = min(start + _SLICE_BYTES, len(body))
            if frame.eof and (frame.unused_data or end < len(body)):
                raise RequestError("the zstd body goes on after its frame: send one frame")
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
