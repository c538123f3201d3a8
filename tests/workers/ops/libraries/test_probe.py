"""A library is used only if it is installed, runs, and computes what our own form does; else the log says why not."""

import logging
import sys

import pytest
import torch
from trainhouse.workers.ops.libraries.probe import probed

from .conftest import Install
from .stand_ins import STAND_INS, StandIn

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("name", STAND_INS)
FAULTS = [(name, fault) for name, each in STAND_INS.items() for fault in each.faults]


def is_used(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> tuple[bool, str]:
    """Returns whether the probe finds the library good, and its only message."""
    with caplog.at_level(logging.INFO):
        found = probed(stand_in.library, CPU, stand_in.compare)
    (message,) = (record.getMessage() for record in caplog.records if record.name.endswith("libraries.probe"))
    assert message.startswith(stand_in.library.NAME)
    return found is not None, message


@EACH
def test_a_library_that_agrees_is_used(name: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        used, message = is_used(install(name), caplog)
    assert used
    assert "runs" in message


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{name}: {fault[1]}" for name, fault in FAULTS])
def test_a_library_that_differs_is_not_used(
    name: str, fault: tuple[str, str], install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = STAND_INS[name]
    assert any(fault[0] in source for source in stand_in.files.values())
    used, message = is_used(install(name, fault), caplog)
    assert not used
    assert "differs by" in message


@EACH
def test_a_library_that_raises_is_not_used(name: str, install: Install, caplog: pytest.LogCaptureFixture) -> None:
    used, message = is_used(
        install(name, ("    assert", "    raise RuntimeError('no kernel image\\nfor it')\n    assert")), caplog
    )
    assert not used
    assert message.endswith("it raised RuntimeError: no kernel image")


@EACH
def test_a_library_that_is_absent_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, STAND_INS[name].module, None)
    used, message = is_used(STAND_INS[name], caplog)
    assert not used
    assert "it is not installed" in message
