"""Inputs that nobody would think of: any body to any route, any bytes to the decoders.

A few of each in every run of the tests; `make fuzz` takes as many as asked.
"""
