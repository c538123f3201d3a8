"""Tensors in files, of which parts are read by slices."""
