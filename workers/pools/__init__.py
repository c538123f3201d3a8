"""Starts the processes of a group's ranks, calls methods on them and notices their death. Pools know no verb.

Each pool keeps the same contract: LocalPool (processes of this machine), RayPool (one actor per rank) and RemotePool
(ranks that another process has started with one of these, and keeps).
"""
