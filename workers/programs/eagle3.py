"""EAGLE-3: a draft that guesses what a base model, or an adapter of it, will say."""

from ..drafts.eagle3 import Eagle3
from ..losses import GUESS_LOSSES
from .program import Program

EAGLE3 = Program("draft", "losses", {"eagle3": GUESS_LOSSES["eagle3"]}, samples=False, strategy=Eagle3())
