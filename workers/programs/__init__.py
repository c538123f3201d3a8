"""The kinds of model, one a file: their modules, required inputs and loss terms."""

from .policy import PolicyProgram

PROGRAMS = {"policy": PolicyProgram}
