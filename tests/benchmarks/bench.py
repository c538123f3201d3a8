"""`make bench`: what this server promises about speed and memory, measured, and PASS or FAIL for each promise.

Whatever is compared is measured in the same run, the sides taking turns. Ends with status 1 when a line fails.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..tiny import tiny_model
from .against_vllm import against_vllm
from .drafts import drafts
from .durability import durability
from .guesses import guesses
from .interactive import interactive
from .large_bodies import large_bodies
from .latency import latency
from .layout_decoding import layout_decoding
from .layout_memory import layout_memory
from .layout_steps import layout_steps
from .many_tenants import many_tenants
from .memory import memory
from .one_tenant import one_tenant
from .overlap import overlap
from .report import Section
from .roles_apart import roles_apart
from .sampling import sampling
from .soak import soak
from .workload import SHAPE

SECTIONS: dict[str, Callable[[Path, Path, str, int], Section]] = {
    "one": one_tenant,
    "tenants": many_tenants,
    "interactive": interactive,
    "empty": latency,
    "memory": memory,
    "sampling": sampling,
    "overlap": overlap,
    "roles": roles_apart,
    "durability": durability,
    "vllm": against_vllm,
    "drafts": drafts,
    "guesses": guesses,
    "layouts": layout_steps,
    "layout-memory": layout_memory,
    "layout-decoding": layout_decoding,
    "bodies": large_bodies,
    "soak": soak,
}
"""Name -> function of the model's directory, a scratch directory, the pool and the number of rounds."""

ASKED_FOR = ("vllm", "drafts", "guesses", "layouts", "layout-memory", "layout-decoding", "bodies", "soak")
"""Only run when named, as `make bench-vllm` and `make bench-parallel` do."""


def main() -> None:
    options = _options()
    os.environ["TINKER_TELEMETRY"] = "0"
    sections = []
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        for name in options.only:
            started = time.monotonic()
            section = SECTIONS[name](model, Path(scratch), options.pool, options.rounds)
            print(section, f"({time.monotonic() - started:.0f} s)", sep="\n", flush=True)
            sections.append(section)
    if options.json:
        options.json.write_text(json.dumps([section.as_json() for section in sections], indent=2))
    failed = [line for section in sections for line in section.lines if not line.passed]
    print("", *failed, f"{len(failed)} of {sum(len(section.lines) for section in sections)} lines failed", sep="\n")
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(SECTIONS)
    parser.add_argument(
        "--only",
        type=_section_names,
        default=[name for name in SECTIONS if name not in ASKED_FOR],
        help=f"some of {names}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", choices=["local", "ray"], default="local")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _section_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    main()
