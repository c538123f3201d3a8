"""Kernels: attention, linear layers, memory and threads of a device."""
