"""The table of the worker's methods that the server calls: what the dispatch and the scheduler must know of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from ...schemas.models import LoraConfig, Utilization
from .calls import AdapterWeights, Failure, ModelInfo, PartAnswer, RunInfo, SliceResult

T = TypeVar("T", covariant=True)

Activity = Literal["pass", "step", "sampling", "saving", "loading", "publishing", "other"]
"""Kinds of work that ranks do."""


@dataclass(frozen=True)
class Method(Generic[T]):
    """A method of the worker's class, with the type of its result."""

    name: str
    activity: Activity = "other"
    """The work that the ranks do in this method."""
    moves_data: bool = False
    """True if the method reads, writes or moves data of any size, or waits for that, so that it may take long."""
    clears_gradients: bool = False
    """True if the method leaves the run without pending gradients."""
    runs_offloaded: bool = False
    """True if the method runs even while the group's models are off the device."""


RUN_PASS = Method[tuple[PartAnswer, ...]]("run_pass", "pass")
APPLY_STEPS = Method[tuple[dict[str, float] | Failure, ...]]("apply_steps", "step")
SAMPLE_SLICE = Method[SliceResult]("sample_slice", "sampling")

CREATE_RUN = Method[RunInfo]("create_run", "loading", clears_gradients=True)
DROP_RUN = Method[None]("drop_run", clears_gradients=True, runs_offloaded=True)
CLEAR_GRADIENTS = Method[None]("clear_gradients", clears_gradients=True)
SAVE_RUN = Method[None]("save_run", "saving", moves_data=True)
LOAD_RUN = Method[None]("load_run", "loading", moves_data=True, clears_gradients=True)
BEGIN_SNAPSHOT = Method[None]("begin_snapshot", "saving", moves_data=True)
ENDED_SNAPSHOTS = Method[Mapping[int, Failure | None]]("ended_snapshots", "saving", runs_offloaded=True)
SET_TARGET = Method[None]("set_target", "loading", moves_data=True)
SET_VOCABULARY = Method[None]("set_vocabulary", clears_gradients=True)
VOCABULARY = Method[np.ndarray]("vocabulary")

COPY_ADAPTER = Method[None]("copy_adapter", "publishing")
EXPORT_ADAPTER = Method[AdapterWeights]("export_adapter", "publishing", moves_data=True)
READ_ADAPTER = Method[AdapterWeights]("read_adapter", moves_data=True)
IMPORT_ADAPTER = Method[None]("import_adapter", "publishing", moves_data=True)
CONVERT_ADAPTER = Method[LoraConfig]("convert_adapter", "saving", moves_data=True)
LOAD_ADAPTER = Method[None]("load_adapter", "loading", moves_data=True)
LOAD_DRAFT = Method[None]("load_draft", "loading", moves_data=True)
DROP_ADAPTER = Method[None]("drop_adapter", runs_offloaded=True)

INFO = Method[ModelInfo]("info")
MEMORY = Method[dict[str, int]]("memory", runs_offloaded=True)
UTILIZATION = Method[Utilization]("utilization", runs_offloaded=True)
DEVICE_NAME = Method[str]("device_name")
OFFLOAD = Method[float]("offload", moves_data=True)
RESET = Method[None]("reset", moves_data=True)
