"""Live training runs: the order of their operations, their execution and their recovery."""
