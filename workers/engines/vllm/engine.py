"""The engine that samples with a vLLM server, ours or one at a URL, using the adapters that we train."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ....schemas.adapters.adapter_files import refusal_by_vllm, write_for_vllm
from ....schemas.adapters.vllm_form import VllmForm, form_of
from ....schemas.errors import OperationError
from ....schemas.models import LoraConfig
from ....schemas.sampling import SampleResponse, SamplingParams
from ...protocol.calls import RunSpec, SampleJob
from ...protocol.methods import LOAD_ADAPTER
from ...protocol.worker_config import SamplingConfig, VllmConfig, WorkerConfig
from ...scheduler.quarantine import MAX_STRIKES, Quarantine
from ...scheduler.rank_group import RankGroup
from ...scheduler.supervision.backoff import backoff
from ...scheduler.supervision.pool_factory import sampler_configs
from ...scheduler.work import OnProgress
from ...shapes.model_shape import read_architecture
from ..engine import Engine
from ..in_flight import InFlightRequests, StreamDeduplicator, cancel_and_wait
from ..weights import load_weights, save_untrained
from .adapters import VllmAdapters, VllmVersion, full_weight_files, link_files, weights_under
from .api import SampleCollector, UnknownModel, VllmApi, VllmUnreachable
from .draft_slot import DraftSlot
from .placed_weights import PlacedWeights
from .requests import VllmModel, VllmRequest, check_supported, split
from .server import VllmProcess, VllmServer

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 8.0
"""Between the attempts at a request."""

_BARE = "bare-base"
"""Id of the base model as an adapter. Runs and samplers cannot have it: their ids contain session ids."""

Done = TypeVar("Done")


@dataclass
class _RetriedJob:
    """A job and its attempts.

    version: the adapter; None means the base model.
    draft: the draft that vLLM must have; None means any.
    num_strikes: failures that only this job can have caused.
    gone_since: when the server was found gone; None until then.
    """

    job: SampleJob
    version: VllmVersion | None
    draft: VllmVersion | None
    streamed: StreamDeduplicator
    num_strikes: int = 0
    num_retries: int = 0
    gone_since: float | None = None


class VllmEngine(Engine):
    """Samples with vLLM. A seed repeats its samples, but they differ from the native engine's, which uses other noise.

    A request keeps the weights that it began with. While vLLM is down, requests wait: for our own server until it has
    restarted, for one at a URL for two minutes.
    """

    def __init__(
        self,
        training: RankGroup,
        save_run: Callable[[str, Path], Awaitable[None]],
        server: VllmServer,
        form: VllmForm,
        max_full_models: int,
        directory: Path | None,
        config: VllmConfig,
    ) -> None:
        """save_run: writes a run, after its previous operations, into an existing empty directory."""
        self._training = training
        self._save_run = save_run
        self._server = server
        self._form = form
        self._max_full_models = max_full_models
        self._api = VllmApi(server, is_mixed=form.experts == "mixed")
        self._base_weights = PlacedWeights(self._api, server, "model")
        self._adapters = VllmAdapters(self._api, training, directory and directory / "adapters")
        draft = PlacedWeights(self._api, server, "draft")
        self._draft_slot = DraftSlot(draft, training, config, directory and directory / "drafts")
        self._in_flight = InFlightRequests()
        self._quarantine = Quarantine(server.name)
        self._model: VllmModel | None = None
        # The base model as an adapter, where vLLM needs one.
        self._bare: VllmVersion | None = None

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason if vLLM does not start, or takes no adapters of this model."""
        if self._form.refusal is not None:
            raise ValueError(f"{self._server.name} is not used: vLLM {self._form.refusal}: use --sampler native")
        self._server.speculative = await self._draft_slot.first_draft()
        await self._server.start(on_progress)
        if self._server.is_on_cpu:
            await self._add_base_adapter()

    async def close(self) -> None:
        await self._in_flight.close()
        await self._base_weights.close()
        await self._draft_slot.close()
        await self._adapters.close()
        await self._api.close()
        await self._server.close()

    def status(self) -> str | None:
        if not self._server.is_ready:
            return f"{self._server.name} is restarting"
        number = len(self._in_flight)
        if not number:
            return None
        requests = f"{number} sampling requests wait or run" if number > 1 else "1 sampling request waits or runs"
        if waiting := self._quarantine.num_waiting:
            requests += f"; {waiting} of them until others are past the point at which it crashed"
        return f"{requests} on {self._server.name}"

    def pids(self) -> list[int]:
        return list(self._server.pids)

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        async def save(version: VllmVersion) -> None:
            await self._save_run(run_id, version.directory)
            self._check_adapter(adapter_id, version.directory)
            await asyncio.to_thread(write_for_vllm, version.directory, self._form)

        await self._adapters.put(adapter_id, save)

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        self._check_adapter(adapter_id, directory)
        await self._adapters.put(adapter_id, partial(link_files, directory, self._form))

    def has_weights(self, weights_id: str) -> bool:
        return weights_id in self._adapters or weights_id in self._draft_slot

    async def drop_adapter(self, adapter_id: str) -> None:
        self._adapters.drop(adapter_id)

    async def load_draft(self, draft_id: str, directory: Path) -> None:
        """Keeps the draft's files, which vLLM loads when a request needs them."""
        await self._draft_slot.keep(draft_id, directory)

    async def drop_draft(self, draft_id: str) -> None:
        self._draft_slot.drop(draft_id)

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        check_supported(job, has_drafts=self._draft_slot.exists)
        return await self._in_flight.run(job.job_id, self._answer(job, on_progress))

    def cancel(self, job_id: str) -> None:
        self._in_flight.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        """Like Engine.memory; has only the transfers of fully trained weights."""
        if not self._server.takes_full_models:
            return {}
        return {f"{self._training.name} (vLLM)": self._base_weights.pushes.memory()}

    async def _answer(self, job: SampleJob, on_progress: OnProgress | None) -> SampleResponse:
        async with self._adapters.in_use(job.adapter_id) as version, self._draft_slot.in_use(job.draft_id) as draft:
            job = job if draft is not None else replace(job, draft_id=None)
            sampling = self._sample(_RetriedJob(job, version, draft, StreamDeduplicator(on_progress)))
            alternatives = job.target_prompt_tokens is not None or job.prompt_alt_tokens_k > 0
            if not (job.prompt_logprobs or job.topk_prompt_logprobs > 0 or alternatives):
                return await sampling
            sampled, scored = await _gather_or_cancel([sampling, self._score(job, version)])
            hits = sampled.prompt_cache_hit_tokens
            return replace(scored, sequences=sampled.sequences, prompt_cache_hit_tokens=hits, guesses=sampled.guesses)

    async def _score(self, job: SampleJob, version: VllmVersion | None) -> SampleResponse:
        """Scores the prompt with the training workers.

        vLLM 0.32 would add the output head's part of an adapter to the wrong rows of a prompt, and crashes on a CPU
        when it scores prompts together with other requests.
        """
        training = self._training
        if version is not None:  # loaded in turn with passes and saves; vLLM does not wait for this
            load = partial(load_weights, training, LOAD_ADAPTER, version.name, version.directory)
            await version.in_training.load(training.supervisor.num_deaths, load)
        scoring = replace(
            job,
            job_id=f"{job.job_id}:scores",
            adapter_id=version and version.name,
            params=SamplingParams(max_tokens=1, seed=job.seed, temperature=job.params.temperature),
            num_samples=1,
            draft_id=None,
            topk_sample_logprobs=0,
            streams=False,
            stop_token_ids=(),
            stop_strings=(),
        )
        return await training.sample(scoring)

    async def _sample(self, retried: _RetriedJob) -> SampleResponse:
        job_id = retried.job.job_id
        try:
            while True:
                try:
                    return await self._sample_when_admitted(retried)
                except VllmUnreachable as gone:
                    self._model = None
                    if retried.num_strikes >= MAX_STRIKES:
                        raise OperationError(
                            f"sampling request {job_id} failed {MAX_STRIKES} times: {self._server.name} {gone};"
                            " see its log",
                            "server",
                        ) from None
                    await self._pause(retried, gone)
        finally:
            self._quarantine.clear(job_id)

    async def _sample_when_admitted(self, retried: _RetriedJob) -> SampleResponse:
        job_id = retried.job.job_id
        async with self._quarantine.admitted(job_id):
            await self._server.ready()
            start = self._server.num_starts
            try:
                with self._quarantine.running(job_id):
                    return await self._api.watch(retried.streamed.run(partial(self._attempt, retried)))
            except UnknownModel as error:
                if retried.version is not None:
                    retried.version.in_vllm.start = None
                retried.num_strikes += 1
                raise VllmUnreachable(str(error), reached=True) from None
            except VllmUnreachable as gone:
                # Only this job can have caused the failure if the server is alive, or crashed while it ran alone.
                is_alive = gone.reached and self._server.num_starts == start and await self._api.is_healthy()
                if gone.reached and (is_alive or self._quarantine.record_crash(job_id)):
                    retried.num_strikes += 1
                raise

    async def _pause(self, retried: _RetriedJob, gone: VllmUnreachable) -> None:
        """Waits before the next attempt. Raises OperationError if the server has been gone for too long."""
        now, most = time.monotonic(), self._server.retry_seconds
        if gone.reached or retried.gone_since is None:
            retried.gone_since = now
        if most is not None and now - retried.gone_since > most:
            raise self._server.silence_error(str(gone))
        retried.num_retries += 1
        await asyncio.sleep(backoff(retried.num_retries, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))

    async def _attempt(self, retried: _RetriedJob, on_progress: OnProgress | None) -> SampleResponse:
        job, version = retried.job, retried.version
        model = self._model = self._model or await self._api.model(self._training.name)
        full, start = weights_under(version), self._server.num_starts
        adapter = self._bare if version is full else version
        requests = split(job, model, adapter and adapter.name)
        await self._base_weights.load(full, start)
        if retried.draft is not None:
            await self._draft_slot.weights.load(retried.draft, start)
        if adapter is not None:
            load = partial(self._api.load_adapter, adapter.name, adapter.directory)
            await adapter.in_vllm.load(start, load)
        samples = SampleCollector(job, on_progress)
        await _gather_or_cancel([self._draw(request, samples) for request in requests])
        return samples.response()

    async def _draw(self, request: VllmRequest, samples: SampleCollector) -> None:
        if not request.streams:
            samples.add(request, await self._api.complete(request))
            return
        async with aclosing(self._api.stream(request)) as answers:
            async for answer in answers:
                samples.add(request, answer)

    def _check_adapter(self, adapter_id: str, directory: Path) -> None:
        """Raises OperationError if the checkpoint has what vLLM does not sample."""
        if full_weight_files(directory):
            self._check_full_model(adapter_id)
        if (refused := refusal_by_vllm(directory, self._form)) is not None:
            raise OperationError(f"vLLM {refused}, or sample them from a server with --sampler native")

    def _check_full_model(self, adapter_id: str) -> None:
        if not self._server.takes_full_models:
            raise OperationError(
                f"{self._server.name} may be used by others, so its weights are not replaced by those of a full model:"
                " train LoRA, or start the server with --vllm-python, which starts a vLLM of its own, or with"
                " --sampler native"
            )
        others = sum(version.is_full for version in self._adapters if version.owner != adapter_id)
        if others >= self._max_full_models:
            raise OperationError(
                f"there are {others} samplers of full models, and max_full_models allows no more: save with kind"
                " inflight, which updates one, end a session that has some, or start the server with a higher"
                " --max-full-models"
            )

    async def _add_base_adapter(self) -> None:
        """Adds the base model as an adapter that changes nothing.

        On a CPU vLLM 0.32 applies the adapter in its last slot, if any, to requests that have no adapter.
        """
        spec = RunSpec(_BARE, LoraConfig(rank=1, seed=0, train_unembed=False))
        self._bare = await self._adapters.put(
            _BARE, lambda version: save_untrained(self._training, spec, version.directory)
        )


async def _gather_or_cancel(works: Sequence[Coroutine[None, None, Done]]) -> list[Done]:
    """Runs all; if one fails, cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


def new_engine(
    number: int,
    model: WorkerConfig,
    sampling: SamplingConfig,
    training: RankGroup,
    save_run: Callable[[str, Path], Awaitable[None]],
    directory: Path | None,
) -> VllmEngine:
    """Returns the engine of the base model with this number, which samples with the vLLM of its URL or with our own."""
    config, form = sampling.vllm, form_of(read_architecture(model.model))
    assert config is not None
    if config.urls:
        server = VllmServer(config.urls[number], config.api_key)
    else:
        server = VllmProcess(sampler_configs(model, sampling)[0], config, form, directory)
    return VllmEngine(training, save_run, server, form, model.max_full_models, directory, config)


ENGINES = {"vllm": new_engine}
"""The row of ../../dispatch.py."""
