"""The CPU's kernels in C, for float32, and the tape that repeats a decode step: a plugin of ../kernels.py."""
