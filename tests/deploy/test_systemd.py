"""The units of deploy/systemd, checked by systemd-analyze, which starts nothing."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ..unit import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MOST_EXPOSURE = 3.0


@pytest.fixture
def analyze() -> str:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("no systemd-analyze here")
    return path


def exposure(analyze: str, unit: Path) -> float:
    """Returns systemd's rating: 0 = restricted as far as possible, 10 = not at all."""
    rated = subprocess.run([analyze, "security", "--offline=true", unit], capture_output=True, text=True, check=True)
    found = re.search(r"exposure level for \S+: ([\d.]+)", rated.stdout)
    assert found is not None, rated.stdout
    return float(found[1])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_leave_little_exposed(analyze: str, unit: Path, tmp_path: Path) -> None:
    assert exposure(analyze, unit) < MOST_EXPOSURE
    open_unit = tmp_path / unit.name
    restrictions = ("Protect", "Restrict", "Private", "Capability", "SystemCall", "Device", "NoNew")
    open_unit.write_text(
        "".join(line for line in unit.read_text().splitlines(keepends=True) if not line.startswith(restrictions))
    )
    assert exposure(analyze, open_unit) > MOST_EXPOSURE


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_knows_every_setting_of_the_units(analyze: str, unit: Path, tmp_path: Path) -> None:
    def complaints(text: str) -> list[str]:
        (tmp_path / unit.name).write_text(text)
        verified = subprocess.run([analyze, "verify", tmp_path / unit.name], capture_output=True, text=True)
        lines = (verified.stdout + verified.stderr).splitlines()
        return [line for line in lines if "is not executable: No such file" not in line]

    # The drop-in is read with the unit that it extends.
    dropins = [path.read_text() for path in sorted((unit.parent / f"{unit.name}.d").glob("*.conf"))]
    text = "\n".join([unit.read_text(), *dropins])
    assert complaints(text) == []
    assert complaints(text.replace("NoNewPrivileges", "NoNewPriviliges"))
