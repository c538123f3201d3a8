"""Several servers on one state: the lease, the lock of the directory, workers that outlive servers."""
