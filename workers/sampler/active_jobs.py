"""The jobs of a sampler from joining to their result."""

from collections.abc import Container, Iterator

from ...schemas.errors import Category, OperationError
from ...schemas.sampling import SampleResponse
from ..batch.validated import ModelLimits
from ..protocol.calls import Failure, SampledPart, SampleJob
from .requests.jobs import NOWHERE, Job, SequenceState
from .requests.lazy_tokenizer import LazyTokenizer
from .requests.sequence_table import EndReason
from .scheduler import SequenceScheduler


class ActiveJobs:
    """The jobs that have not ended, in order of arrival.

    finished: results of the jobs that ended in this slice, by id; cancelled ones get none.
    """

    def __init__(self, scheduler: SequenceScheduler, limits: ModelLimits, text: LazyTokenizer, is_leader: bool) -> None:
        self._scheduler, self._limits, self._text, self._is_leader = scheduler, limits, text, is_leader
        self._jobs: dict[str, Job] = {}
        self._num_joined = 0
        self.finished: dict[str, SampleResponse | Failure] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Yields the jobs, which may end meanwhile."""
        return iter(list(self._jobs.values()))

    @property
    def failures(self) -> dict[str, Failure]:
        return {job_id: result for job_id, result in self.finished.items() if isinstance(result, Failure)}

    def join(self, spec: SampleJob) -> None:
        """Adds a job. An invalid one fails."""
        assert spec.job_id not in self._jobs, f"job {spec.job_id} joined twice"
        try:
            job = Job(spec, self._num_joined, self._limits, self._text, self._is_leader)
            self._scheduler.add(job)
        except OperationError as error:
            self.finished[spec.job_id] = Failure.of(error)
            return
        self._num_joined += 1
        self._jobs[spec.job_id] = job

    def remove(self, job_id: str) -> None:
        """Frees everything that a job holds. Unknown ids are ignored: the job may just have ended."""
        if job := self._jobs.pop(job_id, None):
            self._scheduler.remove(job)

    def fail(self, job_id: str, message: str, category: Category = "user") -> None:
        """Ends a job with a failure. Ignored if it has ended."""
        if job_id in self._jobs:
            self.remove(job_id)
            self.finished[job_id] = Failure(message, category)

    def fail_adapter(self, adapter_id: str, error: OperationError) -> None:
        """Fails the jobs of an adapter."""
        for job in self:
            if job.adapter_id == adapter_id:
                self.fail(job.spec.job_id, error.message, error.category)

    def fail_dropped(self, models: Container[str]) -> None:
        """Fails the jobs of adapters that are not among the models."""
        for job in self:
            if job.adapter_id is not None and job.adapter_id not in models:
                self.fail(job.spec.job_id, f"adapter {job.adapter_id} is gone: its sampler was closed or never saved")

    def end(self, sequence: SequenceState, reason: EndReason) -> None:
        """Ends a sequence, and its job if it was the last one. Ignored if the job has ended."""
        job, job_id = sequence.job, sequence.job.spec.job_id
        if job_id not in self._jobs:
            return
        if reason is EndReason.NOT_FINITE:
            self.fail(
                job_id, f"the model's output is not finite: check that the weights of {job.weights_name} are finite"
            )
            return
        if reason is EndReason.CONSTRAINT_FAILED:
            matcher = sequence.matcher
            self.fail(job_id, (matcher and matcher.failure) or "the first rank could not apply the constraint")
            return
        sequence.stop_reason = "stop" if reason is EndReason.STOP else "length"
        self._scheduler.end(sequence)
        job.num_open -= 1
        if job.num_open == 0:
            self.finished[job_id] = self._jobs.pop(job_id).result()

    def take_new_parts(self) -> dict[str, tuple[SampledPart, ...]]:
        """Returns the tokens that the streaming jobs have sampled since the last call."""
        streaming = {job_id: job for job_id, job in self._jobs.items() if job.spec.streams}
        for job in streaming.values():
            for sequence in job.sequences:
                if sequence.line != NOWHERE:
                    self._scheduler.table.copy_to(sequence)
        parts = {job_id: job.take_new_parts() for job_id, job in streaming.items()}
        return {job_id: new for job_id, new in parts.items() if new}

    def clear(self) -> None:
        """Forgets the jobs, which get no result. The caller clears the scheduler."""
        self._jobs.clear()
