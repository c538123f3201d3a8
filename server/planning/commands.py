"""Adds `trainhouse plan` to the commands of server/cli/commands.py. Imports nothing."""

COMMANDS = {"plan": (".planning.plan", "Estimate the memory per rank of a layout.")}
