"""The memory and the threads of a worker's process."""
