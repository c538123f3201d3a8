"""Kernels: attention, recurrences and linear layers."""
