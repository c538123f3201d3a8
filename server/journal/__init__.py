"""Durable state: accepted operations, their results, and snapshots of runs, all of which survive a crash."""
