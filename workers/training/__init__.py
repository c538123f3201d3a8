"""Runs training passes: forward and backward over the operations of many runs at once."""
