"""Starts the processes of a group's ranks, calls methods on them and notices their death. Pools know no verb.

Each pool keeps the same contract: LocalPool (processes of this machine) and RayPool (one actor per rank).
"""
