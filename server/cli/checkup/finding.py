"""Finding: one thing that `trainhouse doctor` looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """status: "note" for what a server can do without, "problem" for what it cannot. remedy: may be empty."""

    topic: str
    name: str
    value: str
    status: Literal["ok", "note", "problem"] = "ok"
    remedy: str = ""
