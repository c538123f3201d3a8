"""The kinds of model, one a file: what each scores, learns beside LoRA and is trained by."""

from .critic import CRITIC
from .policy import POLICY
from .program import Program
from .reference import REFERENCE

PROGRAMS = {program.role: program for program in (POLICY, CRITIC, REFERENCE)}

__all__ = ["PROGRAMS", "Program"]
