"""A server's process: what it asks of the system."""

import resource

from trainhouse.server.process import allow_many_connections


def test_a_low_limit_of_open_files_is_raised_and_a_high_one_left_alone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 1 << 16 if hard == resource.RLIM_INFINITY else min(1 << 16, hard)
    try:
        for before, after in ((512, enough), (enough, enough), (hard, hard)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            allow_many_connections()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
