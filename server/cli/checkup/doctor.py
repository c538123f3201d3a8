"""`trainhouse doctor`: says what a server finds on this machine, what is wrong, and how fast it trains and samples."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ....workers.resources.machine import cuda_devices
from ...config.load import load_section
from ...config.server_config import OPTIONS
from ...store import StoreConfig
from ..errors import FAILED
from ..options import AsJson, Status, new_app
from ..output import print_json, print_table, spinner
from ..server_flags import Sources, reads_state
from .finding import Finding
from .machine import configuration, devices, disks, installed, limits, port
from .self_test import CPU, GPU, self_test

app = new_app()


@app.command()
@reads_state(host="The server's --host.", port="The server's --port.")
def doctor(
    sources: Sources,
    no_self_test: Annotated[
        bool, typer.Option("--no-self-test", help="Only look: do not serve, train and sample a small model.")
    ] = False,
    as_json: AsJson = False,
) -> Status:
    """Check this machine for a server, and train and sample a small model on it, in under two minutes.

    The exit status is 1 if there is a problem.
    """
    findings: list[Finding] = []
    with spinner("looking at this machine"):
        findings += _looks(sources)
    if not no_self_test:
        with spinner("training and sampling a small model of random weights"):
            findings += self_test(CPU if cuda_devices() is None else GPU)
    problems = [each for each in findings if each.status == "problem"]
    if as_json:
        print_json({"findings": [asdict(each) for each in findings], "num_problems": len(problems)})
    else:
        rows = [(each.topic, each.name, each.value, _advice(each)) for each in findings]
        print_table(("", "", "FOUND", ""), rows)
        print(f"\n{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return FAILED if problems else 0


def _looks(sources: Sources) -> Iterator[Finding]:
    yield from installed()
    yield from devices()
    yield configuration(sources)
    flags, *_ = sources
    yield port(str(flags.get("host", OPTIONS["host"].default)), int(str(flags.get("port", OPTIONS["port"].default))))
    yield limits()
    yield from disks(_state_dir(sources))


def _state_dir(sources: Sources) -> Path:
    try:
        return load_section(StoreConfig, *sources).state_dir
    except ValueError:  # a wrong value is found by `configuration`
        return StoreConfig().state_dir


def _advice(finding: Finding) -> str:
    return f"{finding.status}: {finding.remedy}" if finding.status != "ok" and finding.remedy else ""
