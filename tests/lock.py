"""Writes deploy/requirements.lock: the packages that a checkout needs, with the installed releases.

`python -m trainhouse.tests.lock` prints it; `make lock` runs that in an environment of the newest releases.
"""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "requirements.lock"
HEAD = """\
# The releases with which CI ran, by `make lock`: make setup and deploy/Dockerfile install these. torch, of which there
# are builds, is in constraints.txt.
"""


def declared() -> Mapping[str, list[str]]:
    """Returns requirements by extra; "" = those of every install. Those for GPUs alone are not among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name != "gpu"}
    return {"": project["dependencies"], **extras}


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the installed packages that these requirements bring."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in found if known == name}:
            found.add((name, extra))
            dependencies = map(Requirement, metadata.requires(name) or [])
            waiting += [each for each in dependencies if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def locked() -> str:
    everything = [each for requirements in declared().values() for each in requirements]
    names = closure(everything) - {"torch"}
    return HEAD + "".join(f"{name}=={metadata.version(name)}\n" for name in sorted(names))


if __name__ == "__main__":
    print(locked(), end="")
