import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .stand_ins import STAND_INS, StandIn

Install = Callable[..., StandIn]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a stand-in under its name, with a fault if there is one, until the end of the test."""
    names = {each.module for each in STAND_INS.values()}

    def is_library(module: str) -> bool:
        return module.partition(".")[0] in names

    for module in filter(is_library, list(sys.modules)):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, fault: tuple[str, str] | None = None) -> StandIn:
        STAND_INS[name].write(tmp_path, fault)
        return STAND_INS[name]

    yield write
    for module in filter(is_library, list(sys.modules)):
        del sys.modules[module]
