"""The verbs of this server, those of the core and of drafts."""

from collections.abc import Mapping

from ...schemas import drafts, verbs
from ...schemas.verbs import Verb

VERBS: Mapping[str, Verb] = {**verbs.VERBS, **drafts.VERBS}
