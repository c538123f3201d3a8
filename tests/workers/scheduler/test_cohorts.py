"""Whose slice is next: those that nobody suspects as often as all suspects, and these by turns."""

import asyncio
from collections import Counter

import numpy as np
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.workers.protocol.calls import SampleJob
from trainhouse.workers.scheduler.cohorts import Cohorts, SamplingWork
from trainhouse.workers.scheduler.quarantine import Suspects

LOOP = asyncio.new_event_loop()
LOOP.close()  # futures need one, but nothing is awaited here


def sampling(job_id: str) -> SamplingWork:
    job = SampleJob(job_id, None, np.zeros(3, np.int32), SamplingParams(max_tokens=1, seed=0), (), ())
    return SamplingWork(job, LOOP.create_future(), None)


def cohorts_of(suspects: Suspects, *job_ids: str) -> Cohorts:
    cohorts = Cohorts(suspects)
    for job_id in job_ids:
        cohorts.add(sampling(job_id))
    return cohorts


def taken(cohorts: Cohorts, number: int) -> list[str]:
    """The jobs of so many slices."""
    slices = []
    for _ in range(number):
        cohort = cohorts.next()
        cohort.slice(50.0)
        slices.append("".join(cohort.running))
    return slices


def test_without_suspects_all_run_together() -> None:
    cohorts = cohorts_of(Suspects(4), "a", "b", "c")
    assert taken(cohorts, 3) == ["abc"] * 3 and cohorts.num_apart == 0


def test_suspects_take_every_other_slice_and_turns_that_grow() -> None:
    suspects = Suspects(4)
    suspects.accuse(dict.fromkeys("abcdefgh", 0))
    cohorts = cohorts_of(suspects, *"abcdefgh", "x")
    slices = taken(cohorts, 2000)
    assert set(slices[1::2]) == {"x"} or set(slices[::2]) == {"x"}
    apart = [each for each in slices if each != "x"]
    assert Counter(apart).keys() == {"ab", "cd", "ef", "gh"}
    changes = [number for number in range(1, len(apart)) if apart[number] != apart[number - 1]]
    lengths = [stop - start for start, stop in zip([0, *changes], changes, strict=False)]
    assert lengths == [32] * 4 + [64] * 4 + [128] * (len(lengths) - 8) and len(lengths) > 9
    assert cohorts.num_apart == 8


def test_what_has_ended_leaves_its_turn_to_the_others() -> None:
    suspects = Suspects(4)
    suspects.accuse(dict.fromkeys("ab", 0))
    cohorts = cohorts_of(suspects, "a", "b", "x")
    assert set(taken(cohorts, 40)) == {"x", "a"}
    assert cohorts.ended("a") is not None and cohorts.ended("a") is None
    assert set(taken(cohorts, 4)) == {"x", "b"}
    assert cohorts.cancel("b") is not None and "b" not in cohorts
    [dropping] = [each for each in (cohorts.next(), cohorts.next()) if each.number]
    assert dropping.slice(50.0).cancel == ("b",)
    assert set(taken(cohorts, 4)) == {"x"} and len(cohorts) == 1


def test_a_job_that_comes_again_under_its_name_is_not_ended_by_the_one_that_was_cancelled() -> None:
    cohorts = cohorts_of(Suspects(4), "a")
    taken(cohorts, 1)
    cohorts.cancel("a")
    cohorts.add(sampling("a"))
    assert cohorts.ended("a") is None and "a" in cohorts
    work = cohorts.next().slice(50.0)
    assert work.cancel == ("a",) and [each.job_id for each in work.join] == ["a"]
