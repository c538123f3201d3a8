"""Random and extreme inputs: any body to any route, any bytes to the decoders.

Every run of the tests uses a few of each; `make fuzz` uses as many as requested.
"""
