"""The wheel of `make dist`: its files, and what it does in empty environments."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from trainhouse import __version__

from ..lock import closure, declared
from ..unit import ROOT
from .release import Environment, check_contents, components, main, sbom_path, wheel_in
from .tools import tool


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds it from a copy of the tracked files, as `make dist` does from the sdist."""
    checkout, dist = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
    packing = ["tar", "--create", "--null", "--files-from=-"]
    packed = subprocess.run(packing, cwd=ROOT, input=tracked, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], cwd=checkout, input=packed, check=True)
    before = set(checkout.rglob("*"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", dist, checkout], check=True, capture_output=True
    )
    left = {path.relative_to(checkout) for path in set(checkout.rglob("*")) - before if "__pycache__" not in path.parts}
    assert not left, "the next wheel of this checkout would contain what was deleted since"
    return wheel_in(dist)


@pytest.mark.slow
def test_the_wheel_has_exactly_the_files_of_the_package(wheel: Path, tmp_path: Path) -> None:
    check_contents(wheel)
    lacking = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(lacking, "w") as less:
        for name in whole.namelist():
            if name != "trainhouse/py.typed":
                less.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"differ in \['py.typed'\]"):
        check_contents(lacking)


@pytest.mark.slow
def test_the_client_alone_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    Environment.with_wheel(tmp_path / "client", wheel).try_program("client_alone.py")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_server_works_in_an_empty_environment_and_its_packages_are_listed(wheel: Path) -> None:
    tool("cyclonedx-py")
    main(wheel.parent)
    listed = {name.lower().replace("_", "-") for name in components(sbom_path(wheel))}
    assert closure(declared()[""] + declared()["server"]) <= listed
    assert f'"version": "{__version__}"' in sbom_path(wheel).read_text()
