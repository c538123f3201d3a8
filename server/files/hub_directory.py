"""Blocking operations on a directory in a private model repository of the Hugging Face hub; each change is one commit.

Large files are stored with LFS, not xet, since LFS identifies them by the sha256 that the manifest has.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfUri, parse_hf_uri
from huggingface_hub.constants import DEFAULT_REVISION
from huggingface_hub.utils import disable_progress_bars, logging

from ...workers.models.hub import content_hash, fetch_rest, has_hash
from .manifest import MANIFEST, read_manifest
from .remote_directory import RemoteDirectory


@dataclass(frozen=True)
class HubDirectory(RemoteDirectory):
    def __post_init__(self) -> None:
        # The library's warnings have signed URLs, and its progress bars need a terminal. Our own log has the failures.
        logging.set_verbosity_error()
        disable_progress_bars()

    def put(self, source: Path, names: Sequence[str]) -> None:
        """Uploads in one commit what the hub has not already, such as of an attempt that a crash interrupted. Compares
        the hashes afterwards."""
        self._prepare_repository()
        with ExitStack() as stack:
            # The library uploads open files with LFS, and paths with xet.
            additions = [
                CommitOperationAdd(self._in_repository(name), stack.enter_context((source / name).open("rb")))
                for name in names
            ]
            self._commit(additions, "Add")
        if differing := self._differing(source, names):
            raise OSError(f"the hub's hash of {', '.join(differing)} differs from the hash of what was sent")

    def holds(self, source: Path) -> bool:
        return not self._differing(source, [*read_manifest(source)["files"], MANIFEST])

    def fetch(self, name: str, target: Path) -> None:
        fetch_rest(self.files, self.file(name), target)

    def remove(self) -> None:
        if self.files.find(self.path):
            self._commit([CommitOperationDelete(self._in_repository(""), is_folder=True)], "Remove")

    @property
    def _place(self) -> HfUri:
        return parse_hf_uri(f"hf://{self.path}")

    @property
    def _revision(self) -> str:
        return self._place.revision or DEFAULT_REVISION

    def _in_repository(self, name: str) -> str:
        return f"{self._place.path_in_repo}/{name}"

    def _prepare_repository(self) -> None:
        """Creates the private repository and the branch if they are missing. Raises PermissionError if it is public."""
        hub, repo_id = HfApi(), self._place.id
        if not hub.repo_exists(repo_id):
            hub.create_repo(repo_id, private=True, exist_ok=True)
        if not hub.model_info(repo_id).private:
            raise PermissionError(
                f"{repo_id} is a public repository, where everyone could read all tenants' checkpoints: make it "
                "private, or name another one"
            )
        if not hub.revision_exists(repo_id, self._revision):
            hub.create_branch(repo_id, branch=self._revision, exist_ok=True)

    def _commit(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], verb: str) -> None:
        message = f"{verb} {self._place.path_in_repo}"
        HfApi().create_commit(self._place.id, operations, commit_message=message, revision=self._revision)

    def _differing(self, source: Path, names: Sequence[str]) -> list[str]:
        """Returns the files whose hash at the hub is neither the manifest's nor, for small files, the local file's."""
        listed = read_manifest(source)["files"]
        there = cast(dict[str, dict[str, Any]], self.files.find(self.path, detail=True, refresh=True))
        reported = {path.rpartition(self._in_repository(""))[2]: content_hash(info) for path, info in there.items()}

        def differs(name: str) -> bool:
            found = reported.get(name)
            return found is None or (found != listed.get(name, {}).get("sha256") and not has_hash(source / name, found))

        return [name for name in names if differs(name)]
