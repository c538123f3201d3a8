"""trainhouse: an open HTTP training-as-a-service server that speaks the Tinker protocol, and its thin client."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import *  # noqa: F403
# ruff: noqa: F405 (the names are there for type checkers, and from __getattr__)

__version__ = "0.1.0"
__all__ = [
    "APIConnectionError",
    "APIFuture",
    "APIStatusError",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "CapturedData",
    "CheckpointSchedule",
    "Datum",
    "ForwardBackwardOutput",
    "GoneError",
    "InternalServerError",
    "ModelInput",
    "NotFoundError",
    "PermissionDeniedError",
    "ProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "TrainhouseError",
    "TrainingClient",
]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    """The client's public names, loaded when first asked for: the server and its workers need none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".client", __name__), name)
