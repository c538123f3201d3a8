"""Provides TrainingClient, which trains one model. Operations take effect in the order of the calls.

Each call returns a future immediately: submit the next operation without waiting, so that the server is never idle.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from reprlib import repr as shortened
from typing import Literal, TypeVar

import numpy as np

from ..schemas import checkpoints, drafts, history, schedules, training, verbs
from ..schemas.batches import merge_outputs, split_into_chunks
from ..schemas.codec import decode_forward_backward_output, encode_forward_backward_request
from ..schemas.errors import readable_validation_errors
from ..schemas.futures import SubmitResponse
from ..schemas.models import GetInfoRequest, GetInfoResponse
from ..schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest, Wire
from ..schemas.verbs import Verb
from .arguments import suggests
from .connection import ACCEPT_PROTOBUF, JSON, PROTOBUF, ServerConnection, to_json
from .data import CapturedData, Tokens, as_number, as_tokens
from .errors import APIStatusError
from .futures import APIFuture, blocking
from .sampling import SamplingClient
from .tokenizer import PreTrainedTokenizer, load_tokenizer

W = TypeVar("W", bound=Wire)
LossConfig = Mapping[str, float | str]
Fields = Mapping[str, object]

# (data, log-probabilities of each datum's targets) -> (loss, its gradient by each of those log-probabilities)
CustomLoss = Callable[[Sequence[Datum], Sequence[np.ndarray]], tuple[float, Sequence[np.ndarray]]]


class ChunkLimits(Wire):
    """Bounds one request of forward_backward; a larger batch is split."""

    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000


class TrainingClient:
    """Trains one model; created by ServiceClient.create_lora_training_client and similar methods.

    Methods return futures, whose errors APIFuture.result lists. Invalid arguments raise ValueError or TypeError.
    """

    def __init__(
        self, connection: ServerConnection, info: GetInfoResponse, sampler_numbers: Iterator[int], limits: ChunkLimits
    ) -> None:
        self.model_id = info.model_id
        self._info = info
        self._connection = connection
        self._sampler_numbers = sampler_numbers
        self._limits = limits
        self._seq_id_lock = threading.Lock()
        self._next_seq_id = 1
        self._num_steps = 0
        self._hooks: list[tuple[int, Callable[[int], object]]] = []
        self._submit_lock = asyncio.Lock()  # a fair lock: submits are sent in the order of their seq_id
        self._features_in_use: dict[asyncio.Event, set[str]] = {}  # by pass not sent yet: the features that it needs

    @suggests(loss="loss_fn=", batch="data=", inputs="data=", loss_config="loss_fn_config=")
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossConfig | None = None,
        loss_weight: float = 1.0,
        capture_for: "TrainingClient | None" = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Runs a forward and a backward pass, and accumulates the gradients for `optim_step`.

        The loss is summed over tokens and data, not averaged.

        Args:
            data: at least one datum; large batches are split into chunks.
            loss_fn: name of the loss, such as "cross_entropy", "importance_sampling" or "ppo".
            loss_fn_config: parameters of the loss.
            loss_weight: scales the gradients.
            capture_for: a draft whose target was saved from this policy's current weights. The output's `feature_refs`
                refer to hidden states of this pass, for one forward_backward of the draft; see docs/drafts.md.
        Returns:
            Per datum `logprobs`, float32 of the shape of `target_tokens` (for critics `values`, float32 [T]); and
            metrics, of which `loss:sum` is always present.
        Raises:
            ValueError: `data` is empty.
            TypeError: `data` contains something other than trainhouse.Datum.
        """
        request = self._request(data, loss_fn, loss_fn_config, loss_weight)
        return self._pass(dataclasses.replace(request, capture_for=_id_of(capture_for)))

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossConfig | None = None,
        capture_for: "TrainingClient | None" = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Runs a forward pass: the outputs of `forward_backward` without gradients."""
        request = self._request(data, loss_fn, loss_fn_config)
        return self._pass(dataclasses.replace(request, forward_only=True, capture_for=_id_of(capture_for)))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLoss) -> APIFuture[ForwardBackwardOutput]:
        """Trains with a loss that is computed in this process; waits for a forward pass before it submits the backward.

        The gradients are exact: the backward pass is a cross-entropy weighted by minus the derivatives of the loss.

        Args:
            loss_fn: called with the data and, per datum, the log-probabilities of its targets, float32 of the shape of
                `target_tokens`. Returns the loss and, per datum, its derivative by those log-probabilities.
        Raises:
            ValueError: the model is a critic or a draft, or a derivative has the wrong shape.
        """
        if self._info.model_role == "critic":
            raise ValueError("a critic has no log-probabilities for a custom loss: train it with value_mse")
        if (draft := self._info.draft) is not None:
            raise ValueError(f"a draft has no log-probabilities for a custom loss: train it with {draft.algorithm}")
        _check_kind(data)
        forward = self.forward([with_weights(datum) for datum in data], "cross_entropy").result()
        loss, gradients = loss_fn(data, [output["logprobs"] for output in forward.loss_fn_outputs])
        weighted = [with_weights(datum, -np.asarray(slope)) for datum, slope in zip(data, gradients, strict=True)]
        return self._pass(self._request(weighted, "cross_entropy"), custom_loss=float(loss))

    def _request(
        self, data: Sequence[Datum], loss_fn: str, config: LossConfig | None = None, loss_weight: float = 1.0
    ) -> ForwardBackwardRequest:
        """Builds the request for the whole call; `_pass` splits it into chunks and numbers them."""
        _check_kind(data)
        if not data:
            raise ValueError("data is empty: a pass needs at least one datum")
        _check(loss_fn, "loss_fn", str, "the name of a loss; a function is for forward_backward_custom")
        config = {} if config is None else config
        _check(config, "loss_fn_config", Mapping, "a dict of the loss's parameters")
        options = {name: value if isinstance(value, str) else as_number(value, name) for name, value in config.items()}
        weight = as_number(loss_weight, "loss_weight")
        return ForwardBackwardRequest(self.model_id, 0, tuple(data), loss_fn, options, loss_weight=weight)

    def _pass(
        self, request: ForwardBackwardRequest, custom_loss: float | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        pieces = split_into_chunks(
            request.data, self._limits.fwdbwd_max_chunk_len, self._limits.fwdbwd_max_chunk_bytes_count
        )
        with self._seq_id_lock:
            numbered = enumerate(pieces, self._next_seq_id)
            parts = [dataclasses.replace(request, seq_id=seq_id, data=piece) for seq_id, piece in numbered]
            bodies = [encode_forward_backward_request(part) for part in parts]
            self._next_seq_id += len(bodies)
            return self._connection.run(self._submit_pass(bodies, _refs_of(request.data), custom_loss))

    async def _submit_pass(
        self, bodies: Sequence[bytes], refs: set[str], custom_loss: float | None
    ) -> ForwardBackwardOutput:
        with self._using_features(refs):
            async with self._submit_lock:
                submitted = [await self._submit_chunk(body) for body in bodies]
        output = merge_outputs(await asyncio.gather(*(self._result_of_chunk(chunk) for chunk in submitted)))
        if custom_loss is None:
            return output
        surrogate = {"loss:sum": custom_loss, "surrogate_loss:sum": output.metrics["loss:sum"]}
        return dataclasses.replace(output, metrics={**output.metrics, **surrogate})

    @contextlib.contextmanager
    def _using_features(self, refs: set[str]) -> Iterator[None]:
        """Makes `release_features` of any of these references wait until the end of the block."""
        sent = asyncio.Event()
        if refs:
            self._features_in_use[sent] = refs
        try:
            yield
        finally:
            self._features_in_use.pop(sent, None)
            sent.set()

    async def _submit_chunk(self, body: bytes) -> SubmitResponse | APIStatusError:
        """Submits a chunk; returns a refusal, because the chunks behind it must still be sent to fill their seq_ids."""
        try:
            return await self._connection.submit(verbs.FORWARD_BACKWARD.name, body, PROTOBUF)
        except APIStatusError as error:
            return error

    async def _result_of_chunk(self, submitted: SubmitResponse | APIStatusError) -> ForwardBackwardOutput:
        if isinstance(submitted, APIStatusError):
            raise submitted
        return await self._connection.result(submitted, decode_forward_backward_output, ACCEPT_PROTOBUF)

    @suggests(
        **dict.fromkeys(("lr", "learning_rate"), "adam_params=AdamParams(learning_rate=...)"),
        **dict.fromkeys(("betas", "beta1", "beta2"), "adam_params=AdamParams(beta1=..., beta2=...)"),
        **dict.fromkeys(("weight_decay", "wd"), "adam_params=AdamParams(weight_decay=...)"),
        **dict.fromkeys(("max_grad_norm", "grad_clip_norm"), "adam_params=AdamParams(grad_clip_norm=...)"),
    )
    def optim_step(
        self, adam_params: AdamParams | None = None, gradient_scale: float | Literal["mean"] | None = None
    ) -> APIFuture[training.OptimStepResponse]:
        """Takes one AdamW step on the gradients accumulated since the last step, and clears them.

        Args:
            adam_params: None for the defaults.
            gradient_scale: a factor; "mean" divides by the sum of the weights; None uses the summed gradients.
        """
        fields = {"adam_params": adam_params or AdamParams(), "gradient_scale": gradient_scale}
        stepped = self._operation(verbs.OPTIM_STEP, fields)
        self._num_steps += 1
        for every, hook in self._hooks:
            if self._num_steps % every == 0:
                hook(self._num_steps)
        return stepped

    def at_steps(self, every: int, hook: Callable[[int], object], num_steps: int | None = None) -> None:
        """Makes every `every`-th `optim_step` call hook(step number) before it returns.

        Operations that the hook submits, such as an evaluation or a save, run between that step and the next operation,
        even if the caller never waits for a future.

        Args:
            num_steps: steps taken before, for a resumed run; None counts those of this client.
        Raises:
            ValueError: `every` is less than 1.
        """
        _check(every, "every", int, "a number of steps")
        if every < 1:
            raise ValueError(f"every is {every}: it must be at least 1 step")
        self._num_steps = self._num_steps if num_steps is None else num_steps
        self._hooks.append((every, hook))

    def create_evaluation(
        self,
        name: str,
        every: int,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
    ) -> APIFuture[schedules.CreateEvaluationResponse]:
        """Makes the server evaluate a loss on these data now, and after every `every`-th optimizer step.

        The data are sent once. Results are in the metrics of `optim_step`, as `evaluation/NAME/loss:mean`: the summed
        loss divided by the summed weights. Replaces the model's evaluation of the same name.

        Raises:
            ValueError: `data` is empty.
        """
        _check(name, "name", str, "a text")
        _check(every, "every", int, "a number of steps")
        request = dataclasses.replace(
            self._request(data, loss_fn, loss_fn_config), evaluation=training.EvaluationSchedule(name, every)
        )
        with self._seq_id_lock:
            body = encode_forward_backward_request(dataclasses.replace(request, seq_id=self._next_seq_id))
            self._next_seq_id += 1
            return self._connection.run(self._run_operation(verbs.CREATE_EVALUATION, body, PROTOBUF))

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> APIFuture[history.LogMetricsResponse]:
        """Adds metrics of your own, such as reward and KL, to a step of the run, where get_metrics returns them.

        Args:
            metrics: at most 64, all finite. One that the step has is replaced.
            step: any number from 0 on; None for the number of optim_step calls so far (see at_steps for resumed runs).
        """
        step = self._num_steps if step is None else step
        _check(metrics, "metrics", Mapping, "a dict of numbers, such as {'reward': 0.5}")
        numbers = {name: as_number(value, f"metrics[{name!r}]") for name, value in metrics.items()}
        with readable_validation_errors():
            entry = history.LoggedMetrics(step=step, metrics=numbers)
        request, path = history.LogMetricsRequest(entries=[entry]), f"training_runs/{self.model_id}/metrics"
        return self._connection.run(self._connection.post(path, request, history.LogMetricsResponse))

    def delete_evaluation(self, name: str) -> APIFuture[schedules.DeleteEvaluationResponse]:
        """Ends an evaluation, and deletes its data on the server."""
        return self._operation(verbs.DELETE_EVALUATION, {"name": name})

    def schedule_checkpoints(
        self, checkpoints: schedules.CheckpointSchedule | None
    ) -> APIFuture[schedules.ScheduleCheckpointsResponse]:
        """Makes the server save a checkpoint after every so many optimizer steps, and delete older ones.

        Each can be loaded like one of `save_state`; list_checkpoints has their steps and metrics in `user_metadata`.

        Args:
            checkpoints: None ends it, and keeps the checkpoints.
        """
        return self._operation(verbs.SCHEDULE_CHECKPOINTS, {"checkpoints": checkpoints})

    def set_target(self, path: str | None) -> APIFuture[drafts.SetTargetResponse]:
        """Makes this draft predict a policy's checkpoint from now on.

        Args:
            path: tinker:// path of the checkpoint; None for the bare base model.
        Raises:
            ValueError: this model is not a draft.
        """
        self._require_draft("set_target")
        return self._operation(drafts.SET_TARGET, {"path": path})

    def build_vocab_map(
        self,
        tokens: Sequence[Tokens] | None = None,
        weights: Sequence[Sequence[float] | np.ndarray] | None = None,
        counts: Mapping[int, int] | None = None,
    ) -> APIFuture[drafts.BuildVocabMapResponse]:
        """Sets this draft's vocabulary to the draft_vocab_size most frequent tokens.

        Required before its first forward_backward if its vocabulary is smaller than the base model's.

        Args:
            tokens: sequences of token ids to count.
            weights: one per token; tokens with weight 0 do not count. None counts all.
            counts: token id -> count, instead of `tokens`.
        Raises:
            ValueError: this model is not a draft, or not exactly one of `tokens` and `counts` is given.
        """
        self._require_draft("build_vocab_map")
        fields = {
            "tokens": None if tokens is None else [as_tokens(each) for each in tokens],
            "weights": None if weights is None else [[as_number(each, "weights") for each in row] for row in weights],
            "counts": counts,
        }
        return self._operation(drafts.BUILD_VOCAB_MAP, fields)

    def capture(
        self, data: Sequence[Datum], uses: int | None = None, ttl_seconds: float | None = None
    ) -> APIFuture[CapturedData]:
        """Stores on the server what the draft reads of its target; returns the data with a `feature_ref` each.

        The draft's forward and forward_backward then do not run the target for them, until the next `set_target`.

        Args:
            uses: how many forward_backwards use each; they are deleted after the optim_step of the last. None: any.
            ttl_seconds: deletes them after this time; None and at most: the server's limit.
        Raises:
            ValueError: this model is not a draft, or `data` is empty.
        """
        self._require_draft("capture")
        _check_kind(data)
        if not data:
            raise ValueError("data is empty: capture at least one datum")
        pieces = list(
            split_into_chunks(data, self._limits.fwdbwd_max_chunk_len, self._limits.fwdbwd_max_chunk_bytes_count)
        )
        fields = [
            {
                "data": [{"model_input": each.tokens.tolist()} for each in piece],
                "uses": uses,
                "ttl_seconds": ttl_seconds,
            }
            for piece in pieces
        ]
        captures = [self._operation(drafts.CAPTURE, of_piece) for of_piece in fields]

        async def captured() -> CapturedData:
            return CapturedData(data, [await each for each in captures])

        return self._connection.run(captured())

    def release_features(self, data: Sequence[Datum] | None = None) -> APIFuture[drafts.ReleaseFeaturesResponse]:
        """Releases features captured for this draft: those of `data`, or all.

        Operations submitted earlier still have them. It waits only for passes that use them to be sent, and overtakes a
        `capture` that waits for room.

        Raises:
            ValueError: this model is not a draft.
        """
        self._require_draft("release_features")
        return self._connection.run(self._release_features(None if data is None else _refs_of(data)))

    async def _release_features(self, refs: set[str] | None) -> drafts.ReleaseFeaturesResponse:
        for sent in [sent for sent, needed in self._features_in_use.items() if refs is None or refs & needed]:
            await sent.wait()
        listed = None if refs is None else sorted(refs)
        request = drafts.ReleaseFeaturesRequest(model_id=self.model_id, feature_refs=listed)
        return await self._connection.post("release_features", request, drafts.ReleaseFeaturesResponse)

    def _require_draft(self, verb: str) -> None:
        if self._info.draft is None:
            raise ValueError(f"{verb} is for draft models, and this is a {self._info.model_role}: create_draft_client")

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> APIFuture[checkpoints.SaveWeightsResponse]:
        """Saves weights and optimizer as of the last step as a checkpoint; `.path` of the result can be loaded.

        Args:
            name: of the checkpoint within this run.
            ttl_seconds: deletes it after this time; None keeps it.
            overwrite: replace a checkpoint of the same name.
        """
        fields = {"path": name, "ttl_seconds": ttl_seconds, "overwrite": overwrite}
        return self._operation(verbs.SAVE_WEIGHTS, fields)

    def load_state(self, path: str, optimizer: bool = False) -> APIFuture[checkpoints.LoadWeightsResponse]:
        """Loads the weights of a checkpoint; accumulated gradients are discarded.

        Args:
            path: tinker:// path of the checkpoint.
            optimizer: also load the state of the optimizer, which otherwise starts fresh.
        """
        return self._operation(verbs.LOAD_WEIGHTS, {"path": path, "optimizer": optimizer})

    def load_state_with_optimizer(self, path: str) -> APIFuture[checkpoints.LoadWeightsResponse]:
        """Loads the weights and the optimizer of a checkpoint; accumulated gradients are discarded."""
        return self.load_state(path, optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> APIFuture[checkpoints.SaveWeightsForSamplerResponse]:
        """Saves the weights alone as a checkpoint for `create_sampling_client(model_path=...)`."""
        return self._operation(verbs.SAVE_WEIGHTS_FOR_SAMPLER, {"path": name, "ttl_seconds": ttl_seconds})

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None
    ) -> APIFuture[checkpoints.SaveWeightsExternalResponse]:
        """Saves an adapter as tinker-cookbook reads it, or a full model, for download.

        RestClient.export_checkpoint writes either as other programs read it.
        """
        return self._operation(verbs.SAVE_WEIGHTS_EXTERNAL, {"path": name, "ttl_seconds": ttl_seconds})

    def save_weights_and_get_sampling_client_async(
        self, kind: checkpoints.SamplerKind = "snapshot"
    ) -> APIFuture[SamplingClient]:
        """Creates a sampler of the current weights, without a transfer to the client or a named checkpoint.

        Args:
            kind: "snapshot" keeps these weights; "inflight" samplers of a run share one copy, which each later save of
                this kind replaces.
        """
        fields = {"sampling_session_seq_id": next(self._sampler_numbers), "kind": kind}
        saved = self._operation(verbs.SAVE_WEIGHTS_FOR_SAMPLER, fields)

        async def sampler() -> SamplingClient:
            sampler_id = (await saved).sampling_session_id
            assert sampler_id, "a sampler save without a name answers with a sampling session"
            return SamplingClient(self._connection, sampler_id, self._info.model_name)

        return self._connection.run(sampler())

    save_weights_and_get_sampling_client = blocking(save_weights_and_get_sampling_client_async)

    def _operation(self, verb: Verb[W], fields: Fields) -> APIFuture[W]:
        assert issubclass(verb.request, Wire)
        with self._seq_id_lock:
            address = {"model_id": self.model_id, "seq_id": self._next_seq_id}
            with readable_validation_errors():
                body = to_json(verb.request.model_validate({**address, **fields}))
            self._next_seq_id += 1
            return self._connection.run(self._run_operation(verb, body))

    async def _run_operation(self, verb: Verb[W], body: bytes, headers: dict[str, str] = JSON) -> W:
        async with self._submit_lock:
            submitted = await self._connection.submit(verb.name, body, headers)
        return await self._connection.result(submitted, verb.answer.model_validate_json)

    def get_info_async(self) -> APIFuture[GetInfoResponse]:
        """Describes the model: its base model, adapter, role and context length in tokens."""
        request = GetInfoRequest(model_id=self.model_id)
        return self._connection.run(self._connection.post("get_info", request, GetInfoResponse))

    get_info = blocking(get_info_async)

    def get_tokenizer(self) -> PreTrainedTokenizer:
        """Downloads the base model's tokenizer. Raises TrainhouseError without transformers or tokenizers installed."""
        return self._connection.run(load_tokenizer(self._connection, self._info.model_name)).result()


def _refs_of(data: Sequence[Datum]) -> set[str]:
    return {datum.feature_ref for datum in data if datum.feature_ref is not None}


def _id_of(draft: TrainingClient | None) -> str | None:
    if draft is None:
        return None
    _check(draft, "capture_for", TrainingClient, "the draft's TrainingClient")
    return draft.model_id


def _check(value: object, name: str, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {shortened(value)}: give {wanted}")


def _check_kind(data: Sequence[object]) -> None:
    """Raises TypeError if the data is not a sequence of trainhouse.Datum."""
    if isinstance(data, Datum):
        raise TypeError("data is one Datum: give a list of them, [datum]")
    if not hasattr(data, "__getitem__"):
        raise TypeError(f"data is of type {type(data).__name__}: give a list of trainhouse.Datum")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            kind = type(datum).__name__
            raise TypeError(f"data[{index}] is of type {kind}: pass trainhouse.Datum(tokens, loss_fn_inputs)")


def with_weights(datum: Datum, weights: np.ndarray | None = None) -> Datum:
    """Returns a datum for cross_entropy with these weights; by default the datum's own, else zeros."""
    targets = datum.loss_fn_inputs["target_tokens"]
    weights = datum.loss_fn_inputs.get("weights", np.zeros(targets.shape)) if weights is None else weights
    if weights.shape != targets.shape:
        raise ValueError(f"a gradient has shape {weights.shape}, but its target_tokens have shape {targets.shape}")
    return Datum(datum.tokens, {"target_tokens": targets, "weights": weights.astype(np.float32)})
