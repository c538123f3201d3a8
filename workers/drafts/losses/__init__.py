"""The losses of drafts, by algorithm."""

from ...losses import Loss
from .dflash import DFLASH
from .eagle3 import EAGLE3

DRAFT_LOSSES: dict[str, Loss] = {"eagle3": EAGLE3, "dflash": DFLASH}
