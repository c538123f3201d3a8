"""Tests the order of slices: jobs without suspicion alternate with suspects, which take turns."""

from collections import Counter
from dataclasses import replace

import numpy as np
from trainhouse.schemas.sampling import Constraint, SamplingParams
from trainhouse.workers.protocol.calls import SampleJob
from trainhouse.workers.scheduler.cohorts import Cohorts
from trainhouse.workers.scheduler.quarantine import Suspects
from trainhouse.workers.scheduler.work import SamplingWork


def sampling_work(job_id: str) -> SamplingWork:
    job = SampleJob(job_id, None, np.zeros(3, np.int32), SamplingParams(max_tokens=1, seed=0), (), ())
    return SamplingWork(job)


def cohorts_of(suspects: Suspects, *job_ids: str) -> Cohorts:
    cohorts = Cohorts(suspects)
    for job_id in job_ids:
        cohorts.enqueue_job(sampling_work(job_id))
    return cohorts


def take_slices(cohorts: Cohorts, number: int) -> list[str]:
    """Returns the jobs of each of the next `number` slices."""
    slices = []
    for _ in range(number):
        cohort = cohorts.next()
        cohort.slice(50.0)
        slices.append("".join(cohort.running))
    return slices


def test_without_suspects_all_run_together() -> None:
    cohorts = cohorts_of(Suspects(4), "a", "b", "c")
    assert take_slices(cohorts, 3) == ["abc"] * 3 and cohorts.num_apart == 0


def test_suspects_take_every_other_slice_in_growing_turns() -> None:
    suspects = Suspects(4)
    suspects.accuse(dict.fromkeys("abcdefgh", 0))
    cohorts = cohorts_of(suspects, *"abcdefgh", "x")
    slices = take_slices(cohorts, 2000)
    assert set(slices[1::2]) == {"x"} or set(slices[::2]) == {"x"}
    apart = [each for each in slices if each != "x"]
    assert Counter(apart).keys() == {"ab", "cd", "ef", "gh"}
    changes = [number for number in range(1, len(apart)) if apart[number] != apart[number - 1]]
    lengths = [stop - start for start, stop in zip([0, *changes], changes, strict=False)]
    assert lengths == [32] * 4 + [64] * 4 + [128] * (len(lengths) - 8) and len(lengths) > 9
    assert cohorts.num_apart == 8


def test_ended_and_cancelled_jobs_leave_their_turn_to_others() -> None:
    suspects = Suspects(4)
    suspects.accuse(dict.fromkeys("ab", 0))
    cohorts = cohorts_of(suspects, "a", "b", "x")
    assert set(take_slices(cohorts, 40)) == {"x", "a"}
    assert cohorts.ended("a") is not None and cohorts.ended("a") is None
    assert set(take_slices(cohorts, 4)) == {"x", "b"}
    assert cohorts.cancel("b") is not None and "b" not in cohorts
    [dropping] = [each for each in (cohorts.next(), cohorts.next()) if each.number]
    assert dropping.slice(50.0).cancel == ("b",)
    assert set(take_slices(cohorts, 4)) == {"x"} and len(cohorts) == 1


def test_a_resubmitted_job_is_not_ended_by_its_cancelled_namesake() -> None:
    cohorts = cohorts_of(Suspects(4), "a")
    take_slices(cohorts, 1)
    cohorts.cancel("a")
    cohorts.enqueue_job(sampling_work("a"))
    assert cohorts.ended("a") is None and "a" in cohorts
    work = cohorts.next().slice(50.0)
    assert work.cancel == ("a",) and [each.job_id for each in work.join] == ["a"]


def test_constraints_that_take_long_to_compile_join_one_slice_after_another() -> None:
    """Two tenants with ten constraints each, jobs with the same ones, and jobs without any."""
    cohorts = Cohorts(Suspects(4))
    constraints = [Constraint(regex=f"x{{{number}}}") for number in range(20)]
    for number, constraint in enumerate([*constraints, *constraints, None, None]):
        work = sampling_work(str(number))
        params = work.job.params.model_copy(update={"constraint": constraint})
        tenant = "even" if number % 2 == 0 else "odd"
        cohorts.enqueue_job(SamplingWork(replace(work.job, params=params, tenant_id=tenant, compile_seconds=0.06)))
    cohort, joined = cohorts.next(), []
    while cohort.joining:
        joined.append([int(job.job_id) for job in cohort.slice(50.0).join])
    assert joined[0] == [0, 1, 20, 21, 40, 41], "each tenant's first, jobs with the same, and those without any"
    assert joined[1:] == [[2 * i, 2 * i + 1, 2 * i + 20, 2 * i + 21] for i in range(1, 10)]


def test_cheap_constraints_join_together_and_a_costly_one_joins_alone() -> None:
    cohorts = Cohorts(Suspects(4))
    for number, seconds in enumerate([0.5, 0.5, *[0.001] * 50]):
        work = sampling_work(str(number))
        params = work.job.params.model_copy(update={"constraint": Constraint(regex=f"x{{{number}}}")})
        cohorts.enqueue_job(SamplingWork(replace(work.job, params=params, compile_seconds=seconds)))
    cohort = cohorts.next()
    assert [len(cohort.slice(50.0).join) for _ in range(3)] == [1, 1, 50]
