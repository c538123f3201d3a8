"""The verbs of this server, those of the core and of plugins."""

from collections.abc import Mapping

from ...schemas import verbs
from ...schemas.verbs import Verb
from ...workers.protocol.plugins import plugin_rows

VERBS: Mapping[str, Verb] = {**verbs.VERBS, **plugin_rows("server.drafts.verbs", "VERBS")}
