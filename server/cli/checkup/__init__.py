"""Implements `trainhouse doctor`: what a server finds on this machine, and how fast it runs there."""
