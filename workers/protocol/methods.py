"""Names the worker's methods that the scheduler treats in a special way.

A method that is not named here is quick, needs the device, and leaves pending gradients as they are.
"""

MOVES_DATA = frozenset(
    {"save_run", "load_run", "load_adapter", "load_draft", "set_target", "read_adapter", "convert_adapter"}
    | {"begin_snapshot", "export_adapter", "import_adapter", "reset", "offload"}
)
"""Reads, writes or moves data of any size, or waits for that, so it may take long."""

CLEARS_GRADIENTS = frozenset({"create_run", "load_run", "set_vocabulary", "clear_gradients", "drop_run"})
"""Leaves the run without pending gradients."""

RUNS_OFFLOADED = frozenset({"memory", "utilization", "drop_run", "drop_adapter"})
"""Runs even while the group's models are off the device."""
