"""The devices of a machine, and the memory and the threads of a worker's process."""
