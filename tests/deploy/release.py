"""Tries the wheel in empty environments, as a client alone and as a server, and writes what the latter consists of.

`make dist` runs `python -m trainhouse.tests.deploy.release DIST`.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainhouse import __version__

from ..unit import ROOT

_TOOLS = ROOT / ".venv-deploy" / "bin"
_PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with nothing but a wheel and its dependencies."""

    directory: Path

    @classmethod
    def with_wheel(cls, directory: Path, wheel: Path, extras: Sequence[str] = ()) -> "Environment":
        """Creates one, with the locked releases."""
        _run(sys.executable, "-m", "venv", directory)
        one = cls(directory)
        wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        locks = [f"--constraint={ROOT / 'deploy' / name}" for name in ("constraints.txt", "requirements.lock")]
        index = _run(ROOT / "deploy" / "torch-index.sh").split()
        one.python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index, *locks, wanted)
        one.python("-m", "pip", "check")
        return one

    def python(self, *arguments: str | Path) -> str:
        # Isolated from this checkout: the import must find the installed package.
        return _run(self.directory / "bin" / "python", "-I", *arguments, cwd=self.directory)

    def try_program(self, name: str) -> None:
        print(self.python(_PROGRAMS / name), end="")

    def write_sbom(self, path: Path) -> None:
        """Writes a CycloneDX document of all packages in the environment, which is checked against its schema."""
        options = ("--output-reproducible", "--pyproject", ROOT / "pyproject.toml", "--output-file", path)
        _run(_TOOLS / "cyclonedx-py", "environment", *options, self.directory / "bin" / "python")
        document = json.loads(path.read_text())
        # The version is dynamic in pyproject.toml, so the tool leaves it out.
        document["metadata"]["component"]["version"] = __version__
        path.write_text(json.dumps(document, indent=2) + "\n")


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wheel_in(dist: Path) -> Path:
    """Returns the only wheel of the directory. Raises ValueError."""
    wheels = list(dist.glob("trainhouse-*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"{dist} has {len(wheels)} wheels in place of one: run make dist")
    return wheels[0].absolute()


def check_contents(wheel: Path) -> None:
    """Raises ValueError if the wheel lacks a tracked file of the package, or has others than these."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("trainhouse/") for name in archive.namelist() if name.startswith("trainhouse/")}
    folders = ("client", "examples", "schemas", "server", "workers", "__init__.py", "py.typed")
    tracked = set(_run("git", "ls-files", "--", *folders, cwd=ROOT).splitlines())
    if difference := tracked ^ packed:
        raise ValueError(f"{wheel.name} and the checkout differ in {sorted(difference)}: see package-data in pyproject")


def sbom_path(wheel: Path) -> Path:
    return wheel.with_name(f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json")


def components(sbom: Path) -> dict[str, str]:
    """Returns the versions of packages by name."""
    return {each["name"]: each["version"] for each in json.loads(sbom.read_text())["components"]}


def main(dist: Path) -> None:
    wheel = wheel_in(dist)
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as scratch:
        client = Environment.with_wheel(Path(scratch) / "client", wheel)
        client.try_program("client_alone.py")
        server = Environment.with_wheel(Path(scratch) / "server", wheel, ("server", "postgres", "s3", "otel"))
        server.try_program("server_and_client.py")
        server.write_sbom(sbom_path(wheel))
    print(f"{sbom_path(wheel).name}: {len(components(sbom_path(wheel)))} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
