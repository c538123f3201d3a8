"""Checks what an uploaded adapter_model.safetensors begins with, the list of its tensors, before a rank reads it.

A process of its own does that, which imports this module: it imports little.
"""

from pydantic_core import from_json

from ..errors import RequestError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 32 << 20
_MAX_TENSORS = 1 << 17
"""The experts of the largest models have fewer; a rank looks at each of them."""

_MAX_NAME = 512
_MAX_DIMENSIONS = 8


def header_of(weights: memoryview) -> bytes:
    """Raises RequestError if it is longer than a header may be, or the file shorter."""
    num_bytes = int.from_bytes(weights[:_LENGTH_BYTES], "little")
    if num_bytes > min(_MAX_HEADER_BYTES, len(weights)):
        raise _unreadable(f"its header has {num_bytes} bytes, and at most {_MAX_HEADER_BYTES} and all of it are read")
    return bytes(weights[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes])


def check_header(header: bytes) -> None:
    """Raises RequestError if a rank would take long to read the tensors of this header."""
    try:
        entries = from_json(header)
    except ValueError as error:
        raise _unreadable(f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _unreadable("its header is not a JSON object")
    entries.pop("__metadata__", None)
    if len(entries) > _MAX_TENSORS:
        raise _unreadable(f"it has {len(entries)} tensors, and at most {_MAX_TENSORS} are read")
    for name, entry in entries.items():
        if len(name) > _MAX_NAME:
            raise _unreadable(f"the name {name[:80]!r}... has {len(name)} characters, and at most {_MAX_NAME} are read")
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise _unreadable(f"{name} has no shape of at most {_MAX_DIMENSIONS} dimensions")


def _unreadable(reason: str) -> RequestError:
    return RequestError(f"adapter_model.safetensors cannot be read: {reason}: send the file as peft saved it")
