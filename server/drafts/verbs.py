"""Verbs of drafts, and scopes of their other routes. Imports nothing of the server, whose tables read it early."""

from ...schemas.drafts import VERBS as _OPERATIONS

VERBS = _OPERATIONS
SCOPES = {"POST /api/v1/release_features": ("train",)}
