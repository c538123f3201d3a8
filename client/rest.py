"""RestClient: what the server keeps: training runs, checkpoints, sessions. No session of its own is opened."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..schemas import checkpoints
from ..schemas.checkpoints import (
    CopyWeightsResponse,
    ExternalWeightsUrls,
    ImportWeightsResponse,
    WeightsInfoResponse,
)
from ..schemas.models import CheckpointList, SessionInfo, SessionList, TrainingRun, TrainingRunList
from ..schemas.sampling import SamplerInfo
from ..schemas.training import Wire
from .connection import JSON, Connection, to_json
from .futures import APIFuture

W = TypeVar("W", bound=Wire)
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
IMPORT_SECONDS = 600.0  # an upload, and its turn between passes


class RestClient:
    """Made by ServiceClient.create_rest_client. Checkpoints are named by their tinker:// path."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _get(self, path: str, answer: type[W], **query: int) -> APIFuture[W]:
        return self._connection.run(self._connection.get(path, answer, **query))

    def list_training_runs(self, limit: int = 20, offset: int = 0) -> APIFuture[TrainingRunList]:
        return self._get("training_runs", TrainingRunList, limit=limit, offset=offset)

    def get_training_run(self, training_run_id: str) -> APIFuture[TrainingRun]:
        return self._get(f"training_runs/{training_run_id}", TrainingRun)

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointList]:
        """Of one training run."""
        return self._get(f"training_runs/{training_run_id}/checkpoints", CheckpointList)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointList]:
        """Of all training runs of this API key."""
        return self._get("checkpoints", CheckpointList, limit=limit, offset=offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        request = checkpoints.WeightsInfoRequest(tinker_path=tinker_path)
        return self._connection.run(self._connection.post("weights_info", request, WeightsInfoResponse))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._change("DELETE", checkpoint_address(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Lets every API key of this server read it."""
        return self._change("POST", f"{checkpoint_address(tinker_path)}/publish")

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._change("DELETE", f"{checkpoint_address(tinker_path)}/publish")

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Deletes it after so many seconds (an hour to ten years); None keeps it for good."""
        body = to_json(checkpoints.TtlRequest(ttl_seconds=ttl_seconds))
        return self._change("PUT", f"{checkpoint_address(tinker_path)}/ttl", body)

    def _change(self, method: str, path: str, content: bytes = b"") -> APIFuture[None]:
        async def change() -> None:
            await self._connection.request(method, path, content, JSON if content else None)

        return self._connection.run(change())

    def copy_weights(self, tinker_path: str, ttl_seconds: int | None = None) -> APIFuture[CopyWeightsResponse]:
        """A copy of a published (or one's own) checkpoint, owned by this API key."""
        request = checkpoints.CopyWeightsRequest(source_path=tinker_path, ttl_seconds=ttl_seconds)
        key = {"X-Idempotency-Key": str(uuid.uuid4())}
        return self._connection.run(self._connection.post("copy_weights", request, CopyWeightsResponse, key))

    def import_adapter(
        self, directory: str | Path, base_model: str | None = None, name: str = "imported"
    ) -> APIFuture[ImportWeightsResponse]:
        """An adapter that peft has saved in a directory, as a checkpoint without optimizer state.

        base_model: else the one that adapter_config.json names.
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

    def download_checkpoint(self, tinker_path: str, directory: str | Path) -> APIFuture[list[Path]]:
        """Fetches the files of a checkpoint (an adapter that loads in PEFT, or a full model) into `directory`."""
        return self._connection.run(self._download(tinker_path, Path(directory), lambda name: True))

    def export_checkpoint(self, tinker_path: str, directory: str | Path) -> APIFuture[list[Path]]:
        """As download_checkpoint, without the state of the optimizer: programs that load a directory read all tensors
        that are in it."""
        return self._connection.run(self._download(tinker_path, Path(directory), _is_for_others))

    async def _download(self, tinker_path: str, directory: Path, wanted: Callable[[str], bool]) -> list[Path]:
        address = f"{checkpoint_address(tinker_path)}/external_weights_urls"
        listing = await self._connection.get(address, ExternalWeightsUrls)
        paths = {inside(directory, name): url for name, url in listing.urls.items() if wanted(name)}
        for path, url in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            await self._connection.download(url, path)
        return list(paths)

    def list_sessions(self, limit: int = 20, offset: int = 0) -> APIFuture[SessionList]:
        return self._get("sessions", SessionList, limit=limit, offset=offset)

    def get_session(self, session_id: str) -> APIFuture[SessionInfo]:
        return self._get(f"sessions/{session_id}", SessionInfo)

    def get_sampler(self, sampler_id: str) -> APIFuture[SamplerInfo]:
        return self._get(f"samplers/{sampler_id}", SamplerInfo)


def checkpoint_address(tinker_path: str) -> str:
    """tinker://RUN/weights/NAME -> training_runs/RUN/checkpoints/weights/NAME"""
    parts = tinker_path.removeprefix("tinker://").split("/")
    if not tinker_path.startswith("tinker://") or len(parts) != 3:
        raise ValueError(
            f"{tinker_path!r} is no checkpoint path: it reads tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        )
    return f"training_runs/{parts[0]}/checkpoints/{parts[1]}/{parts[2]}"


def _is_for_others(name: str) -> bool:
    return not name.startswith("optimizer")


def inside(directory: Path, name: str) -> Path:
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise ValueError(f"the server names a file {name!r} outside of {directory}")
    return path
