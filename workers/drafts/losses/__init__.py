"""The losses of drafts, by algorithm, and that of a pass that only captures features."""

from ...losses import Loss
from .capture import CAPTURE
from .dflash import DFLASH
from .eagle3 import EAGLE3

DRAFT_LOSSES: dict[str, Loss] = {"eagle3": EAGLE3, "dflash": DFLASH}

CAPTURES: dict[str, Loss] = {"capture": CAPTURE}
