"""Delays between retries grow up to a limit, and a worker that served for a while restarts at once."""

import time

from trainhouse.workers.scheduler.supervision.backoff import RestartBackoff, backoff


def test_delays_double_up_to_the_limit() -> None:
    assert [backoff(number, 0.25, 1.5) for number in range(6)] == [0.0, 0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff(5000, 0.25, 3600.0) == 3600.0, "without an overflow"


def test_restart_delay_grows_while_a_worker_keeps_dying() -> None:
    keeps_dying = RestartBackoff(first=1.0, limit=5.0, steady_after=60.0)
    keeps_dying.started()
    assert [keeps_dying.next_delay() for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, 5.0]
    steady = RestartBackoff(first=0.001, steady_after=0.01)
    for _ in range(2):
        steady.started()
        time.sleep(0.05)
        assert steady.next_delay() == 0.0
