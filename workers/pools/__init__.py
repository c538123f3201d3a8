"""The processes: pools start the ranks of a group, call methods on them, notice their death. Know no verb.

One promise, kept in several ways: LocalPool (processes of this machine), RayPool (an actor per rank), and RemotePool
(those that another process has started with one of these, and keeps).
"""
