"""trainhouse: an open HTTP training-as-a-service server that speaks the Tinker protocol, and its thin client."""

from .schemas.version import VERSION as __version__

__all__ = ["__version__"]
