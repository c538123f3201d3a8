"""DFlash: a draft that guesses blocks of what a base model, or an adapter of it, will say."""

from ..drafts.dflash import DFlash
from ..losses import GUESS_LOSSES
from .program import Program

DFLASH = Program("draft", "losses", {"dflash": GUESS_LOSSES["dflash"]}, samples=False, strategy=DFlash())
