"""Libraries of CUDA kernels that need not be installed: one file adapts each; see probe.py."""
