"""zstd, within a limit. zstandard is not in the bare client install, so it is imported where it is used."""

from collections.abc import Iterator

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
        return _decompress_zstd(body, limit_bytes)
    raise RequestError(f"content encoding {shown(encoding)} is not supported: send zstd or none", 415)


def _decompress_zstd(body: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    for piece in _zstd_pieces(body):
        size += len(piece)
        if size > limit_bytes:
            raise RequestError(f"the body has more than {limit_bytes} bytes once decompressed, which is the limit", 413)
        pieces.append(piece)
    return b"".join(pieces)


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
    try:
        import zstandard  # not in the bare client install
    except ImportError:
        raise RequestError("this server cannot read zstd: send the body uncompressed", 415) from None
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
