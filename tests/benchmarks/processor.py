"""What a server costs the machine, as Linux counts it."""

import os
from pathlib import Path


def cpu_seconds(session_id: int) -> float:
    """User and system seconds so far of all live processes of a session: of a live server's, the id is its pid."""
    ticks = sum(_ticks(stat, session_id) for stat in Path("/proc").glob("[0-9]*/stat"))
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(stat: Path, session_id: int) -> int:
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The command's name, in parentheses, may hold anything; after it come state, parent, group, session, ...
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if int(fields[3]) == session_id else 0
