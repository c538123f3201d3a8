"""The files of captured features, TENANT/ADDRESS.safetensors, and the references to each in TENANT/ADDRESS.json.

Workers write the former. All methods block.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from ..files.directories import STAGING, move_into_place, staging_in

_SUFFIX = ".safetensors"


@dataclass
class Reference:
    """run_id: that has captured it. uses: how often it may still be used; None = any number. taken: the last step of a
    run that has taken uses, by run: it does not once more, where a death comes between that and its answer."""

    name: str
    run_id: str
    expires_at: float
    uses: int | None = None
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Kept:
    """A sequence's features. references: by name. holders: operations that need it, by run and seq_id."""

    tenant_id: str
    address: str
    num_bytes: int
    references: dict[str, Reference] = field(default_factory=dict)
    holders: set[tuple[str, int]] = field(default_factory=set)


class FeatureFiles:
    """Below a directory of the server's."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def of(self, tenant_id: str) -> Path:
        return self._root / quote(tenant_id, safe="")

    def tenants(self) -> list[str]:
        return [unquote(path.name) for path in self._root.glob("*") if path.is_dir()]

    def read(self) -> list[Kept]:
        """What is referred to, nothing of which is held."""
        found = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            try:
                references = [Reference(**each) for each in json.loads(path.with_suffix(".json").read_text())]
            except (OSError, ValueError, TypeError):
                continue  # of a capture that was never answered: what nobody knows is deleted
            kept = Kept(unquote(path.parent.name), path.stem, path.stat().st_size)
            kept.references = {reference.name: reference for reference in references}
            found.append(kept)
        return found

    def are_there(self, tenant_id: str, addresses: Iterable[str]) -> bool:
        """Raises OSError where nobody can tell."""
        directory = self.of(tenant_id)
        return all((directory / f"{address}{_SUFFIX}").exists() for address in addresses)

    def write(self, tenant_id: str, told: Sequence[tuple[str, str]], dropped: Sequence[str]) -> None:
        """told: addresses, and their references by `as_text`. dropped: addresses. Raises OSError."""
        directory = self.of(tenant_id)
        for address, text in told:
            staging = staging_in(directory)
            staging.write_text(text)
            move_into_place(staging, directory / f"{address}.json")
        for address in dropped:
            for suffix in (".json", _SUFFIX):
                (directory / f"{address}{suffix}").unlink(missing_ok=True)

    def delete_others(self, tenant_id: str, known: Collection[str]) -> None:
        """known: addresses. Raises OSError."""
        directory = self.of(tenant_id)
        for path in directory.iterdir() if directory.exists() else ():
            if path.name.partition(".")[0] not in known or path.name.startswith(STAGING):
                path.unlink(missing_ok=True)


def as_text(kept: Kept) -> str:
    return json.dumps([asdict(reference) for reference in kept.references.values()])
