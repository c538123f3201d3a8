"""Implements `trainhouse doctor` and `bench`: what a server finds on its machine, and how fast a server runs."""
