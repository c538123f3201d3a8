"""`make bench`: what this server promises about speed and memory, measured, and PASS or FAIL for each promise.

All sides of a comparison are measured in the same run and take turns. Ends with status 1 if a line fails.
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
from .drafts import draft_memory, drafts, speculation, target_forms
from .durability import durability
from .families import families
from .full_in_vllm import full_in_vllm
from .harness import SHAPE, Section, Setup
from .memory import memory, soak
from .neighbours import neighbours
from .observability import observability
from .overlap import overlap, roles_apart
from .parallel import layout_decoding, layout_memory, layout_steps
from .sampling import against_vllm, sampling
from .server import large_bodies, latency
from .training import interactive, many_tenants, one_tenant

DEFAULT: dict[str, Callable[[Setup], Section]] = {
    "one": one_tenant,
    "tenants": many_tenants,
    "interactive": interactive,
    "empty": latency,
    "memory": memory,
    "sampling": sampling,
    "overlap": overlap,
    "roles": roles_apart,
    "durability": durability,
    "families": families,
    "observability": observability,
    "neighbours": neighbours,
}
ON_REQUEST: dict[str, Callable[[Setup], Section]] = {
    "vllm": against_vllm,
    "full-in-vllm": full_in_vllm,
    "drafts": drafts,
    "target-forms": target_forms,
    "draft-memory": draft_memory,
    "speculation": speculation,
    "layouts": layout_steps,
    "layout-memory": layout_memory,
    "layout-decoding": layout_decoding,
    "bodies": large_bodies,
    "soak": soak,
}
"""Only run when named, as `make bench-vllm` and `make bench-parallel` do."""
SECTIONS = DEFAULT | ON_REQUEST


def main() -> None:
    options = _options()
    os.environ["TINKER_TELEMETRY"] = "0"
    sections = []
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model("qwen3", Path(scratch) / "model", **SHAPE)
        setup = Setup(model, Path(scratch), options.pool, options.rounds)
        for name in options.only:
            started = time.monotonic()
            section = SECTIONS[name](setup)
            print(section, f"({time.monotonic() - started:.0f} s)", sep="\n", flush=True)
            sections.append(section)
    if options.json:
        options.json.write_text(json.dumps([section.as_json() for section in sections], indent=2))
    failed = [line for section in sections for line in section.lines if not line.passed]
    print("", *failed, f"{len(failed)} of {sum(len(section.lines) for section in sections)} lines failed", sep="\n")
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_section_names, default=list(DEFAULT), help=f"some of {','.join(SECTIONS)}")
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
