"""Files of captured features, TENANT/ADDRESS.safetensors, and the references to each, TENANT/ADDRESS.json.

The workers write the features; this module writes the references. All methods block.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from ..files.directories import STAGING, move_into_place, staging_path

_SUFFIX = ".safetensors"


@dataclass
class FeatureReference:
    """A name by which operations use captured features.

    run_id: the run that captured them. uses: how many are left; None: unlimited. taken: seq_id of the last step that
    took uses, by run; if the process dies before that step is answered, a retry does not take them twice.
    """

    name: str
    run_id: str
    expires_at: float
    uses: int | None = None
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class FeatureRecord:
    """The stored features of one sequence.

    references: by name. holders: operations that need the features, by run and seq_id.
    """

    tenant_id: str
    address: str
    num_bytes: int
    references: dict[str, FeatureReference] = field(default_factory=dict)
    holders: set[tuple[str, int]] = field(default_factory=set)


class FeatureFiles:
    """Reads and writes the files below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def of(self, tenant_id: str) -> Path:
        return self._root / quote(tenant_id, safe="")

    def tenants(self) -> list[str]:
        return [unquote(path.name) for path in self._root.glob("*") if path.is_dir()]

    def read(self) -> list[FeatureRecord]:
        """Returns the features that have references; no holder is set."""
        found = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            try:
                references = [FeatureReference(**each) for each in json.loads(path.with_suffix(".json").read_text())]
            except (OSError, ValueError, TypeError):
                continue  # left by a capture that was never answered: unrecorded files are deleted
            kept = FeatureRecord(unquote(path.parent.name), path.stem, path.stat().st_size)
            kept.references = {reference.name: reference for reference in references}
            found.append(kept)
        return found

    def exist(self, tenant_id: str, addresses: Iterable[str]) -> bool:
        """True if all these files exist. Raises OSError if the disk cannot be read."""
        directory = self.of(tenant_id)
        return all((directory / f"{address}{_SUFFIX}").exists() for address in addresses)

    def write(self, tenant_id: str, references: Sequence[tuple[str, str]], dropped: Sequence[str]) -> None:
        """Writes references (`references`: pairs of an address and `as_text`), and deletes the files of `dropped`
        addresses.

        Raises OSError.
        """
        directory = self.of(tenant_id)
        for address, text in references:
            staging = staging_path(directory)
            staging.write_text(text)
            move_into_place(staging, directory / f"{address}.json")
        for address in dropped:
            for suffix in (".json", _SUFFIX):
                (directory / f"{address}{suffix}").unlink(missing_ok=True)

    def delete_others(self, tenant_id: str, known: Collection[str]) -> None:
        """Deletes all files of the tenant except those of the `known` addresses. Raises OSError."""
        directory = self.of(tenant_id)
        for path in directory.iterdir() if directory.exists() else ():
            if path.name.partition(".")[0] not in known or path.name.startswith(STAGING):
                path.unlink(missing_ok=True)


def as_text(kept: FeatureRecord) -> str:
    return json.dumps([asdict(reference) for reference in kept.references.values()])
