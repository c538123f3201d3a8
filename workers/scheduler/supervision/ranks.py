"""Presents the ranks of one base model as a single worker: splits work over them and merges their answers."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....schemas.errors import OperationError
from ....schemas.training import ForwardBackwardOutput
from ...batch.bins import balance_bins
from ...pools.base import PerRank, Pool, WorkerError
from ...protocol.calls import DataShare, Failure, OperationPart, Pass, RankOutput, SampleJob, SamplingSlice, SliceResult
from ...protocol.methods import RUN_PASS, SAMPLE_SLICE
from ...protocol.parallel_spec import ParallelSpec
from ...protocol.shared_fs import SharedFileProbe


class Ranks:
    """A group's ranks behind one interface. Methods raise as the pool does."""

    def __init__(self, pool: Pool, spec: ParallelSpec, shared_directories: Sequence[str] = ()) -> None:
        """Wraps the pool.

        Args:
            shared_directories: directories of this machine that all ranks must be able to read and write.
        """
        self.pool = pool
        self._spec = spec
        self._shared_directories = shared_directories
        self._placement = _JobPlacement(spec)
        self.idle_tokens = 0
        """Tokens by which the shares of the last pass are shorter than the longest, on which their ranks wait."""

    async def start(self, loading_seconds: float = math.inf, call_seconds: float = math.inf) -> None:
        """Loads the base model on every rank; kept ranks have it loaded and drop what an earlier server left.

        Args:
            loading_seconds: time limit for starting and loading, after which a rank counts as hung.
            call_seconds: time limit of each call after that.
        Raises:
            ValueError: a rank does not see a shared directory.
        """
        await self.pool.start(loading_seconds)
        try:
            if self.pool.is_kept:
                await self._reset(call_seconds)
            elif self._spec.num_ranks > 1:
                [address, *_] = await self.pool.broadcast("open_rendezvous", hang_seconds=loading_seconds)
                await self.pool.broadcast("load", address, hang_seconds=loading_seconds)
            for directory in self._shared_directories:
                await self._check_shared(directory, call_seconds)
        except BaseException:
            await self.pool.close()
            raise

    async def _reset(self, hang_seconds: float) -> None:
        """Drops what an earlier server left. Ranks whose model that server had not loaded yet are killed."""
        try:
            await self.pool.broadcast("reset", hang_seconds=hang_seconds)
        except (WorkerError, OperationError, ValueError) as error:
            raise self.pool.kill(f"it could not be reset ({error})") from error

    async def _check_shared(self, directory: str, hang_seconds: float) -> None:
        probe = await asyncio.to_thread(SharedFileProbe.write_into, directory)
        try:
            for rank, problem in enumerate(await self.pool.broadcast("check_shared", probe, hang_seconds=hang_seconds)):
                if problem is not None:
                    raise ValueError(
                        f"{directory} is not shared with rank {rank}: {problem}; ranks read and write there: mount one "
                        "file system at the same path on every machine, or set --state-dir (and --checkpoints, if it "
                        "is a directory) to a directory on such a file system"
                    )
        finally:
            await asyncio.to_thread(probe.remove)

    async def close(self) -> None:
        await self.pool.close()

    async def call(self, method: str, *arguments: object, hang_seconds: float) -> Any:
        """Calls the method on all ranks, for methods that answer the same everywhere; returns the first rank's
        answer.
        """
        [answer, *_] = await self.pool.broadcast(method, *arguments, hang_seconds=hang_seconds, lockstep=True)
        return answer

    async def call_each(self, method: str, *arguments: object, hang_seconds: float) -> list[Any]:
        """Calls the method on all ranks and returns every rank's answer."""
        return await self.pool.broadcast(method, *arguments, hang_seconds=hang_seconds, lockstep=True)

    async def send_pass(self, parts: Pass, hang_seconds: float) -> Sequence[ForwardBackwardOutput | Failure | None]:
        if self._spec.num_ranks == 1:
            [answers] = await self.pool.broadcast(RUN_PASS.name, parts, hang_seconds=hang_seconds)
            return answers
        shares = split_pass(parts, self._spec.num_data_shares)
        self.idle_tokens = idle_tokens(shares)
        of_ranks = PerRank(tuple(shares[self._spec.data_share_of(rank)] for rank in range(self._spec.num_ranks)))
        answers = await self.call_each(RUN_PASS.name, of_ranks, hang_seconds=hang_seconds)
        return [_merge_answers(of_part) for of_part in zip(*answers, strict=True)]

    async def run_slice(self, work: SamplingSlice, hang_seconds: float) -> SliceResult:
        if self._spec.num_ranks == 1:
            return await self.call(SAMPLE_SLICE.name, work, hang_seconds=hang_seconds)
        of_ranks = PerRank(self._placement.split(work))
        results = await self.call_each(SAMPLE_SLICE.name, of_ranks, hang_seconds=hang_seconds)
        return self._placement.merge(results)


def idle_tokens(shares: Sequence[Pass]) -> int:
    """Returns the tokens by which the shares are shorter than the longest of them."""
    tokens = [sum(len(datum.tokens) for part in share for datum in part.request.data) for share in shares]
    return max(tokens) * len(tokens) - sum(tokens)


def split_pass(parts: Pass, num_shares: int) -> list[Pass]:
    """Splits the data of all parts into shares with about equal numbers of tokens."""
    data = [(number, j) for number, part in enumerate(parts) for j in range(len(part.request.data))]
    lengths = [len(parts[number].request.data[j].tokens) for number, j in data]
    shares: list[Pass] = []
    for members in balance_bins(lengths, num_shares):
        taken: list[list[int]] = [[] for _ in parts]
        for number, j in (data[k] for k in sorted(members)):
            taken[number].append(j)
        shares.append(tuple(map(_part_of, parts, taken)))
    return shares


def _part_of(part: OperationPart, indices: list[int]) -> OperationPart:
    """Returns the part with these of its data only."""
    whole = part.data_share
    share = DataShare(tuple(whole.indices[j] for j in indices), whole.num_data)
    request = replace(part.request, data=tuple(part.request.data[j] for j in indices))
    return replace(part, request=request, rank_share=share)


def _merge_answers(answers: Sequence[RankOutput | Failure | None]) -> ForwardBackwardOutput | Failure | None:
    """Merges the ranks' answers to one part.

    Ranks agree on failures. Each has the outputs of its share; ranks with the same share may each have different
    fields.
    """
    outputs: dict[int, Mapping[str, Any]] = {}
    for answer in answers:
        if not isinstance(answer, RankOutput):
            return answer
        for number, output in answer.outputs.items():
            outputs[number] = {**outputs.get(number, {}), **output}
    assert isinstance(answers[0], RankOutput)
    return ForwardBackwardOutput(tuple(outputs[number] for number in sorted(outputs)), answers[0].metrics)


class _JobPlacement:
    """Assigns sampling jobs to ranks. The ranks of a tp or ep group decode the same jobs together."""

    def __init__(self, spec: ParallelSpec) -> None:
        self._team_of = [0] * spec.num_ranks
        teams = spec.rank_groups(("ep", "tp"))
        for number, ranks in enumerate(teams):
            for rank in ranks:
                self._team_of[rank] = number
        self._first_of = [ranks[0] for ranks in teams]
        self._team_of_job: dict[str, int] = {}
        self._tokens = [0] * len(teams)
        self._tokens_of_job: dict[str, int] = {}

    def split(self, work: SamplingSlice) -> tuple[SamplingSlice, ...]:
        joining: list[list[SampleJob]] = [[] for _ in self._tokens]
        for job in work.join:
            joining[self._place(job)].append(job)
        return tuple(replace(work, join=tuple(joining[team])) for team in self._team_of)

    def merge(self, results: Sequence[SliceResult]) -> SliceResult:
        of_teams = [results[rank] for rank in self._first_of]
        finished = {job_id: answer for result in of_teams for job_id, answer in result.finished.items()}
        for job_id in finished:
            self._forget(job_id)
        progress = {job_id: parts for result in of_teams for job_id, parts in result.progress.items()}
        return SliceResult(finished, sum(result.num_active for result in of_teams), progress)

    def _place(self, job: SampleJob) -> int:
        """Assigns the job to the team with the fewest waiting tokens."""
        team = self._tokens.index(min(self._tokens))
        self._team_of_job[job.job_id], self._tokens_of_job[job.job_id] = team, job.most_tokens
        self._tokens[team] += job.most_tokens
        return team

    def _forget(self, job_id: str) -> None:
        """Forgets the job; a cancelled job may be reported twice."""
        team = self._team_of_job.pop(job_id, None)
        if team is not None:
            self._tokens[team] -= self._tokens_of_job.pop(job_id)
