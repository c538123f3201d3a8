"""The verbs of this server, those of the core and of drafts; routes, the gate and the journal read this table."""

from collections.abc import Mapping

from ...schemas import verbs
from ...schemas.verbs import Verb
from ...workers.protocol.plugins import plugin_rows

_OF_DRAFTS: Mapping[str, Verb] = plugin_rows("server.drafts.verbs", "VERBS")

VERBS: Mapping[str, Verb] = {**verbs.VERBS, **_OF_DRAFTS}

HAS_DRAFTS = bool(_OF_DRAFTS)
"""False if server/drafts was taken away."""
