"""Several servers on one state: the lease, the lock of the state directory, and workers that outlive servers."""
