"""Provides RestClient, which lists and manages stored training runs, checkpoints and sessions without a session."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx

from ..schemas import checkpoints
from ..schemas.adapters.adapter_files import Reader, refusal_by_peft
from ..schemas.adapters.model_files import config_sha256, is_loopback
from ..schemas.checkpoints import (
    CopyWeightsResponse,
    ExternalWeightsUrls,
    ImportWeightsResponse,
    WeightsInfoResponse,
)
from ..schemas.history import RunMetrics, RunOperationList
from ..schemas.models import CheckpointList, ServerCapabilities, SessionInfo, SessionList, TrainingRun, TrainingRunList
from ..schemas.sampling import SamplerInfo
from ..schemas.training import Wire
from .connection import JSON, ServerConnection, to_json
from .export_checkpoint import (
    ExportedCheckpoint,
    description_in,
    log,
    new_directory,
    write_adapter,
    write_merged,
    write_merged_unasked,
)
from .futures import APIFuture

W = TypeVar("W", bound=Wire)
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
IMPORT_SECONDS = 600.0  # time for the upload, and for the worker to finish its current passes

OnProgress = Callable[[int, int], None]


class RestClient:
    """Lists and manages training runs, checkpoints and sessions; ServiceClient.create_rest_client creates it.

    Checkpoints are named by their path, tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME; a malformed
    path raises ValueError. The futures raise NotFoundError if the object does not exist for this API key, and the other
    errors of APIFuture.result.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def _get(self, path: str, answer: type[W], **query: int | str) -> APIFuture[W]:
        return self._connection.run(self._connection.get(path, answer, **query))

    def list_training_runs(self, limit: int = 20, offset: int = 0, search: str = "") -> APIFuture[TrainingRunList]:
        """Lists the training runs of this API key, the last used first.

        Args:
            search: only runs with this text, in any case, in their id, base model or metadata, or in their session's
                name.
        """
        return self._get("training_runs", TrainingRunList, limit=limit, offset=offset, search=search)

    def get_training_run(self, training_run_id: str) -> APIFuture[TrainingRun]:
        return self._get(f"training_runs/{training_run_id}", TrainingRun)

    def get_metrics(
        self,
        training_run_id: str,
        after: int = -1,
        logged_after: int = -1,
        limit: int = 1000,
        points: int | None = None,
    ) -> APIFuture[RunMetrics]:
        """Returns the metrics of one of your runs: of its optimizer steps, and those that were logged.

        Args:
            after, logged_after: `next` of an earlier answer, for the steps that follow.
            limit: of steps, at most 2,000, or 100,000 with `points`.
            points: most values of each series, which are then means of consecutive steps.
        """
        query = {"after": after, "logged_after": logged_after, "limit": limit}
        if points is not None:
            query["points"] = points
        return self._get(f"training_runs/{training_run_id}/metrics", RunMetrics, **query)

    def list_operations(
        self, training_run_id: str, before: int | None = None, limit: int = 100
    ) -> APIFuture[RunOperationList]:
        """Lists the ended operations of one of your runs, the last first: how long each waited and ran, and why it
        failed. `before` is `next` of an earlier answer."""
        query = {"limit": limit} if before is None else {"limit": limit, "before": before}
        return self._get(f"training_runs/{training_run_id}/operations", RunOperationList, **query)

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointList]:
        """Lists the checkpoints of one training run, oldest first; only the public ones of another tenant's run."""
        return self._get(f"training_runs/{training_run_id}/checkpoints", CheckpointList)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointList]:
        """Lists the checkpoints of this API key, newest first."""
        return self._get("checkpoints", CheckpointList, limit=limit, offset=offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Returns the base model, the role and, for an adapter, the shape of a checkpoint."""
        request = checkpoints.WeightsInfoRequest(tinker_path=tinker_path)
        return self._connection.run(self._connection.post("weights_info", request, WeightsInfoResponse))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Deletes one of your checkpoints and its files immediately."""
        return self._change("DELETE", checkpoint_address(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes one of your checkpoints readable by every API key of this server."""
        return self._change("POST", f"{checkpoint_address(tinker_path)}/publish")

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Makes a published checkpoint private again; copies that others have made are kept."""
        return self._change("DELETE", f"{checkpoint_address(tinker_path)}/publish")

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Deletes the checkpoint after `ttl_seconds` from now (an hour to ten years); None keeps it forever."""
        body = to_json(checkpoints.TtlRequest(ttl_seconds=ttl_seconds))
        return self._change("PUT", f"{checkpoint_address(tinker_path)}/ttl", body)

    def _change(self, method: str, path: str, content: bytes = b"") -> APIFuture[None]:
        async def change() -> None:
            await self._connection.request(method, path, content, JSON if content else None)

        return self._connection.run(change())

    def copy_weights(self, tinker_path: str, ttl_seconds: int | None = None) -> APIFuture[CopyWeightsResponse]:
        """Copies a published checkpoint or one of your own; the copy belongs to this API key."""
        request = checkpoints.CopyWeightsRequest(source_path=tinker_path, ttl_seconds=ttl_seconds)
        key = {"X-Idempotency-Key": str(uuid.uuid4())}
        return self._connection.run(self._connection.post("copy_weights", request, CopyWeightsResponse, key))

    def import_adapter(
        self, directory: str | Path, base_model: str | None = None, name: str = "imported"
    ) -> APIFuture[ImportWeightsResponse]:
        """Uploads an adapter saved by PEFT as a checkpoint without optimizer state.

        Args:
            directory: contains adapter_config.json and adapter_model.safetensors.
            base_model: None for the one that adapter_config.json names.
            name: of the new checkpoint.
        Raises:
            ValueError: a file is missing (raised by the future).
        """
        return self._connection.run(self._import(Path(directory), base_model, name))

    async def _import(self, directory: Path, base_model: str | None, name: str) -> ImportWeightsResponse:
        config, weights = (self._file_of_peft(directory / file) for file in PEFT_FILES)
        query: dict[str, int | str] = {"config_bytes": len(config), "name": name}
        if base_model is not None:
            query["base_model"] = base_model
        headers = {"Content-Type": "application/octet-stream", "X-Idempotency-Key": str(uuid.uuid4())}
        response = await self._connection.request(
            "POST", "import_weights", config + weights, headers, query, timeout_seconds=IMPORT_SECONDS
        )
        return ImportWeightsResponse.model_validate_json(response.content)

    @staticmethod
    def _file_of_peft(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: name a directory that peft's save_pretrained wrote") from None

    def download_checkpoint(
        self, tinker_path: str, directory: str | Path, on_progress: OnProgress | None = None
    ) -> APIFuture[list[Path]]:
        """Downloads the files of a checkpoint as they are; returns their paths.

        Args:
            on_progress: called in another thread with the bytes that have arrived, and those of all files; not at all
                if a server does not say the sizes.
        """
        return self._connection.run(self._download(tinker_path, Path(directory), lambda name: True, on_progress))

    def export_checkpoint(
        self,
        tinker_path: str,
        directory: str | Path,
        reader: Reader | None = None,
        merge_into: str | Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> APIFuture[ExportedCheckpoint]:
        """Downloads a checkpoint for other programs: a full model, or an adapter as the reader reads it.

        The optimizer state is left out, since such programs load every tensor file they find. Files that are encrypted
        stay as they are.

        Args:
            directory: a new or empty one.
            reader: None writes adapters for peft, and merges those that peft refuses into the base model, whose files
                must be on this machine: in the directory that a server on this machine loaded, or in one of its name or
                in the Hugging Face cache. The note and a warning say why. "peft" writes them as they are.
            merge_into: the directory of the base model: writes that with the adapter added to its weights, instead.
            on_progress: as for download_checkpoint.
        Raises:
            ValueError: vLLM does not read the adapter, or it cannot be merged (raised by the future). Nothing was
                written.
            OSError: such as a full disk (raised by the future). Nothing of a merged model was written.
        """
        base = None if merge_into is None else Path(merge_into)
        return self._connection.run(self._export(tinker_path, Path(directory), reader, base, on_progress))

    async def _export(
        self,
        tinker_path: str,
        directory: Path,
        reader: Reader | None,
        merge_into: Path | None,
        on_progress: OnProgress | None,
    ) -> ExportedCheckpoint:
        if reader is not None and merge_into is not None:
            raise ValueError("a merged model is for no reader: leave out merge_into or reader")
        with new_directory(directory) as scratch:
            await self._download(tinker_path, scratch, lambda name: not name.startswith("optimizer"), on_progress)
            description = description_in(scratch)
            served = await self._served_directory(description["base_model"]) if description else None
            if merge_into is not None:
                note = await asyncio.to_thread(write_merged, scratch, merge_into, directory)
            elif reader is None and description.get("role") != "critic" and refusal_by_peft(description):
                # Not for a critic's adapter: no base model has its head.
                note = await asyncio.to_thread(write_merged_unasked, scratch, served, directory)
                log.warning("%s is %s", tinker_path, note)
            else:
                note = await asyncio.to_thread(write_adapter, scratch, served, directory, reader or "peft")
        return ExportedCheckpoint.of(directory, note)

    async def _served_directory(self, base_model: str) -> Path | None:
        """Returns the directory that a server on this machine has loaded under this name.

        A loopback address may also be a tunnel's, so its config.json must be the one that the server has loaded.
        """
        if not is_loopback(httpx.URL(self._connection.base_url).host):
            return None
        served = (await self._connection.get("get_server_capabilities", ServerCapabilities)).supported_models
        for model in served:
            if model.model_name == base_model and model.directory is not None and model.config_sha256 is not None:
                found = Path(model.directory)
                return found if await asyncio.to_thread(config_sha256, found) == model.config_sha256 else None
        return None

    async def _download(
        self, tinker_path: str, directory: Path, wanted: Callable[[str], bool], on_progress: OnProgress | None
    ) -> list[Path]:
        address = f"{checkpoint_address(tinker_path)}/external_weights_urls"
        listing = await self._connection.get(address, ExternalWeightsUrls)
        paths = {path_inside(directory, name): url for name, url in listing.urls.items() if wanted(name)}
        on_bytes = await self._counting(list(paths.values()), on_progress)
        for path, url in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            await self._connection.download(url, path, on_bytes)
        return list(paths)

    async def _counting(self, urls: Sequence[str], on_progress: OnProgress | None) -> Callable[[int], None]:
        """Returns a function that adds up the bytes of these files, and reports them next to the bytes of all."""
        sizes = [] if on_progress is None else await asyncio.gather(*map(self._connection.size_of, urls))
        total, done = sum(size or 0 for size in sizes), 0

        def add(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if on_progress is not None and None not in sizes:
                on_progress(done, total)

        return add

    def list_sessions(self, limit: int = 20, offset: int = 0) -> APIFuture[SessionList]:
        return self._get("sessions", SessionList, limit=limit, offset=offset)

    def get_session(self, session_id: str) -> APIFuture[SessionInfo]:
        return self._get(f"sessions/{session_id}", SessionInfo)

    def get_sampler(self, sampler_id: str) -> APIFuture[SamplerInfo]:
        return self._get(f"samplers/{sampler_id}", SamplerInfo)


def checkpoint_address(tinker_path: str) -> str:
    """Converts tinker://RUN/weights/NAME to training_runs/RUN/checkpoints/weights/NAME. Raises ValueError."""
    parts = tinker_path.removeprefix("tinker://").split("/")
    if not tinker_path.startswith("tinker://") or len(parts) != 3:
        raise ValueError(
            f"{tinker_path!r} is not a checkpoint path: use tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        )
    return f"training_runs/{parts[0]}/checkpoints/{parts[1]}/{parts[2]}"


def path_inside(directory: Path, name: str) -> Path:
    """Returns the path of the file. Raises ValueError if a hostile name would leave the directory."""
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise ValueError(f"the server names a file outside of {directory}, {name!r}: it is not downloaded")
    return path
