"""`trainhouse doctor`: says what a server finds on this machine, what is wrong, and how fast it trains and samples."""

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
from .machine import Finding, configuration, devices, disks, installed, limits, port
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
    flags, *_ = sources
    host, number = (str(flags.get(name, OPTIONS[name].default)) for name in ("host", "port"))
    with spinner("looking at this machine"):
        findings += [*installed(), *devices(), configuration(sources), port(host, int(number)), limits()]
        findings += disks(_state_dir(sources))
    if not no_self_test:
        with spinner("training and sampling a small model of random weights"):
            findings += self_test(CPU if cuda_devices() is None else GPU)
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings], "num_problems": len(problems)})
    else:
        rows = [(finding.topic, finding.name, finding.value, _advice(finding)) for finding in findings]
        print_table(("", "", "FOUND", ""), rows)
        print(f"\n{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return FAILED if problems else 0


def _state_dir(sources: Sources) -> Path:
    try:
        return load_section(StoreConfig, *sources).state_dir
    except ValueError:  # a wrong value is found by `configuration`
        return StoreConfig().state_dir


def _advice(finding: Finding) -> str:
    return f"{finding.status}: {finding.remedy}" if finding.status != "ok" and finding.remedy else ""
