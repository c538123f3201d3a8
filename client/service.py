"""Provides ServiceClient, which creates all other clients. Opens a session at the first need and keeps it alive."""

import asyncio
import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import httpx

from .. import __version__
from ..schemas import models
from ..schemas.errors import readable_validation_errors
from ..schemas.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse, SamplerInfo
from ..schemas.training import TargetRepr, Wire
from ..schemas.verbs import CREATE_MODEL, LOAD_WEIGHTS, Verb
from .arguments import suggests
from .connection import ServerConnection, log, to_json
from .errors import APIStatusError, GoneError
from .futures import APIFuture, blocking
from .rest import RestClient
from .sampling import SamplingClient
from .training import ChunkLimits, TrainingClient

Status = Literal["success", "errored", "interrupted"]
Metadata = Mapping[str, str] | None
HEARTBEAT_SECONDS = 10
SDK_VERSION = f"trainhouse-{__version__}"


class Session:
    """A session on the server: numbers its models and samplers, and sends its heartbeats."""

    def __init__(self, session_id: str, limits: ChunkLimits, connection: ServerConnection) -> None:
        self.session_id = session_id
        self.limits = limits
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()
        self._heartbeat = asyncio.create_task(self._beat(connection))

    async def _beat(self, connection: ServerConnection) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                request = models.HeartbeatRequest(session_id=self.session_id)
                await connection.post_without_retry("session_heartbeat", request, timeout_seconds=10)
            except GoneError as error:
                log.warning("session %s: %s", self.session_id, error)
                return
            except (httpx.TransportError, APIStatusError) as error:
                log.info("heartbeat of session %s: %s", self.session_id, error)


def url_and_key(base_url: str | None = None, api_key: str | None = None) -> tuple[str, str]:
    """Returns the URL of the server and the key to use, from the environment where they are None."""
    official_url = os.environ.get("TINKER_BASE_URL")
    base_url = base_url or os.environ.get("TRAINHOUSE_BASE_URL") or official_url or "http://127.0.0.1:8000"
    # The key of another service is sent to no other URL than its own.
    official_key = os.environ.get("TINKER_API_KEY") if base_url == official_url else None
    return base_url, api_key or os.environ.get("TRAINHOUSE_API_KEY") or official_key or "tml-local"


class ServiceClient:
    """Connects to a server with one API key. Use it as a context manager, or call `close()`.

    A method `x` with a variant `x_async` waits for the result; `x_async` returns a future immediately. APIFuture.result
    lists the errors of both.

    Args:
        base_url: default TRAINHOUSE_BASE_URL, else TINKER_BASE_URL, else http://127.0.0.1:8000.
        api_key: default TRAINHOUSE_API_KEY, else TINKER_API_KEY if the URL is that of TINKER_BASE_URL, else
            "tml-local", which a server on a loopback address without configured keys accepts.
        user_metadata: stored with the session.
        retry_seconds: how long requests to an unreachable or failing server are retried before a call raises.
        project_id: the session's project, by which lists can be filtered.
        display_name: title of the session and its runs in the console and in lists.
    Raises:
        APIConnectionError: `base_url` is malformed.
        ValueError: `api_key` is empty or has characters that no key has, or `project_id` or `display_name` is too long.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        user_metadata: Metadata = None,
        retry_seconds: float = 300,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        if api_key == "":
            raise ValueError("api_key is empty: give a key, or None for that of the environment")
        with readable_validation_errors():
            self._described = models.CreateSessionRequest(
                sdk_version=SDK_VERSION,
                user_metadata=dict(user_metadata or {}),
                project_id=project_id,
                display_name=display_name,
            )
        self._connection = ServerConnection(*url_and_key(base_url, api_key), retry_seconds)
        self._opening = asyncio.Lock()
        self._session: Session | None = None

    def get_server_capabilities_async(self) -> APIFuture[models.ServerCapabilities]:
        """Lists the base models that the server has loaded, with their context lengths in tokens."""
        return self._connection.run(self._connection.get("get_server_capabilities", models.ServerCapabilities))

    get_server_capabilities = blocking(get_server_capabilities_async)

    def get_limits_async(self) -> APIFuture[models.Limits]:
        """Returns the limits on this API key's queued work and requests per minute, and how much is in use."""
        return self._connection.run(self._connection.get("limits", models.Limits))

    get_limits = blocking(get_limits_async)

    def get_workers_async(self) -> APIFuture[models.Workers]:
        """Reports what the server's workers hold in memory."""
        return self._connection.run(self._connection.get("workers", models.Workers))

    get_workers = blocking(get_workers_async)

    def create_rest_client(self) -> RestClient:
        return RestClient(self._connection)

    @suggests(
        **dict.fromkeys(("model", "model_name"), "base_model="),
        **dict.fromkeys(("lora_rank", "r"), "rank="),
        **dict.fromkeys(("lora_alpha", "alpha"), "none, alpha is 32 at every rank"),
        **dict.fromkeys(("lora_dropout", "dropout"), "none, there is no dropout"),
        **dict.fromkeys(("target_modules", "modules"), "train_attn=, train_mlp= and train_unembed="),
        **dict.fromkeys(("lr", "learning_rate"), "it at each step, optim_step(AdamParams(learning_rate=...))"),
    )
    def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Metadata = None,
        model_role: models.Role = "policy",
        expert_factors: models.ExpertFactors = "shared",
    ) -> APIFuture[TrainingClient]:
        """Creates a LoRA adapter on a base model.

        Args:
            rank: of the adapter.
            seed: for the initial weights; None draws one.
            train_mlp, train_attn, train_unembed: which linear layers get an adapter.
            model_role: a "critic" is trained with the loss `value_mse`, and its `forward` returns a value per token.
            expert_factors: "shared" or "each", see docs/parallel.md; without effect on a model that has no experts.
        """
        targets = {"train_mlp": train_mlp, "train_attn": train_attn, "train_unembed": train_unembed}
        with readable_validation_errors():
            lora = models.LoraConfig(rank=rank, seed=seed, expert_factors=expert_factors, **targets)
        fields = {"base_model": base_model, "lora_config": lora, "user_metadata": user_metadata}
        fields["model_role"] = model_role
        return self._connection.run(self._create(CREATE_MODEL, fields))

    create_lora_training_client = blocking(create_lora_training_client_async)

    def create_full_training_client_async(
        self,
        base_model: str,
        seed: int | None = None,
        user_metadata: Metadata = None,
        model_role: models.Role = "policy",
    ) -> APIFuture[TrainingClient]:
        """Creates a model that trains all weights. seed: for a critic's head. See docs/full.md."""
        fields = {"base_model": base_model, "training": "full", "seed": seed, "user_metadata": user_metadata}
        fields["model_role"] = model_role
        return self._connection.run(self._create(CREATE_MODEL, fields))

    create_full_training_client = blocking(create_full_training_client_async)

    def create_reference_client_async(
        self, base_model: str | None = None, path: str | None = None
    ) -> APIFuture[TrainingClient]:
        """Creates a reference model, which only runs `forward`, from a base model or from a policy's checkpoint.

        Its `load_state` replaces the weights by another checkpoint of a policy.

        Raises:
            ValueError: both or neither of `base_model` and `path` are given.
        """
        if path is not None and base_model is None:
            fields = {"path": path, "optimizer": False, "model_role": "reference"}
            return self._connection.run(self._create(LOAD_WEIGHTS, fields))
        if base_model is None or path is not None:
            raise ValueError(f"give either base_model or path, not {base_model=} and {path=}")
        # The smallest adapter: it is never trained, and `load_state` brings the shape of its checkpoint.
        return self.create_lora_training_client_async(
            base_model, rank=1, train_unembed=False, train_mlp=False, model_role="reference"
        )

    create_reference_client = blocking(create_reference_client_async)

    def create_draft_client_async(
        self,
        base_model: str,
        algorithm: models.Algorithm,
        target_path: str | None = None,
        num_layers: int | None = None,
        capture_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        target_repr: TargetRepr | None = None,
        target_top_k: int | None = None,
        seed: int | None = None,
        user_metadata: Metadata = None,
    ) -> APIFuture[TrainingClient]:
        """Creates a draft model, which learns to predict the tokens of a target for speculative sampling.

        Defaults depend on the base model; `get_info().draft` returns the resulting configuration. See docs/drafts.md.

        Args:
            target_path: checkpoint of a policy to predict; None for the base model.
            target_repr: the form in which an eagle3 draft reads the target's distribution, and in which `capture`
                stores it; with "pruned_logits", target_top_k of them per token, or those of the draft's vocabulary.
        """
        with readable_validation_errors():
            draft = models.NewDraft(
                algorithm=algorithm,
                num_layers=num_layers,
                capture_layers=None if capture_layers is None else tuple(capture_layers),
                draft_vocab_size=draft_vocab_size,
                intermediate_size=intermediate_size,
                block_size=block_size,
                mask_token_id=mask_token_id,
                target_repr=target_repr,
                target_top_k=target_top_k,
                seed=seed,
            )
        fields = {"base_model": base_model, "model_role": "draft", "draft": draft, "target_path": target_path}
        fields["user_metadata"] = user_metadata
        return self._connection.run(self._create(CREATE_MODEL, fields))

    create_draft_client = blocking(create_draft_client_async)

    def create_training_client_from_state_async(self, path: str) -> APIFuture[TrainingClient]:
        """Creates a model with the weights of a checkpoint and a fresh optimizer."""
        fields = {"path": path, "optimizer": False}
        return self._connection.run(self._create(LOAD_WEIGHTS, fields))

    create_training_client_from_state = blocking(create_training_client_from_state_async)

    def create_training_client_from_state_with_optimizer_async(self, path: str) -> APIFuture[TrainingClient]:
        """Creates a model with the weights and optimizer of a checkpoint; it continues exactly from `save_state`."""
        fields = {"path": path, "optimizer": True}
        return self._connection.run(self._create(LOAD_WEIGHTS, fields))

    create_training_client_from_state_with_optimizer = blocking(create_training_client_from_state_with_optimizer_async)

    async def _create(self, verb: Verb, fields: Mapping[str, object]) -> TrainingClient:
        assert issubclass(verb.request, Wire)
        session = await self._open_session()
        number = next(session.model_numbers)
        address = {"session_id": session.session_id, "model_seq_id": number}
        with readable_validation_errors():
            body = to_json(verb.request.model_validate({**address, **fields}))
        submitted = await self._connection.submit(verb.name, body)
        await self._connection.result(submitted, Wire.model_validate_json)
        model = models.GetInfoRequest(model_id=f"{session.session_id}:train:{number}")  # the protocol fixes this name
        info = await self._connection.post("get_info", model, models.GetInfoResponse)
        if info.warning is not None:
            log.warning("%s: %s", info.model_id, info.warning)
        return TrainingClient(self._connection, info, session.sampler_numbers, session.limits)

    @suggests(
        **dict.fromkeys(("model", "model_name"), "base_model= or model_path="),
        **dict.fromkeys(("path", "checkpoint"), "model_path="),
    )
    def create_sampling_client_async(
        self, base_model: str | None = None, model_path: str | None = None, draft_path: str | None = None
    ) -> APIFuture[SamplingClient]:
        """Creates a client that samples a base model or saved weights.

        Args:
            base_model: name of a base model; give either this or `model_path`.
            model_path: tinker:// path of a checkpoint.
            draft_path: tinker:// path of a draft for speculative sampling.
        Raises:
            ValueError: both or neither of `base_model` and `model_path` are given.
        """
        if (base_model is None) == (model_path is None):
            raise ValueError(f"give either base_model or model_path, not {base_model=} and {model_path=}")
        return self._connection.run(self._create_sampler(base_model, model_path, draft_path))

    create_sampling_client = blocking(create_sampling_client_async)

    async def _create_sampler(
        self, base_model: str | None, model_path: str | None, draft_path: str | None
    ) -> SamplingClient:
        session = await self._open_session()
        address = {"session_id": session.session_id, "sampling_session_seq_id": next(session.sampler_numbers)}
        with readable_validation_errors():
            request = CreateSamplingSessionRequest(
                **address, base_model=base_model, model_path=model_path, draft_path=draft_path
            )
        created = await self._connection.post("create_sampling_session", request, CreateSamplingSessionResponse)
        info = await self._connection.get(f"samplers/{created.sampling_session_id}", SamplerInfo)
        return SamplingClient(self._connection, info.sampler_id, info.base_model)

    async def _open_session(self) -> Session:
        async with self._opening:
            if self._session is None:
                limits = await self._connection.post("client/config", self._described, ChunkLimits)
                # With the key, a retry returns the same session instead of a second one.
                key, answer = {"X-Idempotency-Key": str(uuid.uuid4())}, models.CreateSessionResponse
                created = await self._connection.post("create_session", self._described, answer, key)
                self._session = Session(created.session_id, limits, self._connection)
            return self._session

    def close(self, status: Status = "success", detail: str | None = None) -> None:
        """Ends the session, which releases its models and samplers, and the background thread. Checkpoints are kept.

        Futures that are not finished raise TrainhouseError.
        """
        if self._session:
            self._connection.run(self._finish(self._session.session_id, status, detail)).result()
            self._session = None
        self._connection.close()

    async def _finish(self, session_id: str, status: Status, detail: str | None) -> None:
        request = models.FinishSessionRequest(reason=models.FinishReason(type=status), detail=detail)
        try:
            await self._connection.post_without_retry(f"sessions/{session_id}/finish", request, timeout_seconds=5)
        except (httpx.TransportError, APIStatusError) as error:
            log.info("session %s is left to expire: %s", session_id, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = "success" if kind is None else "errored" if issubclass(kind, Exception) else "interrupted"
        self.close(status, kind and kind.__name__)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self.__exit__, kind)
