"""Programs of the benchmarks that run in other processes: see `child` in harness, and workers that pools load."""
