"""The planner's rows in the table of commands, in a module that imports nothing."""

COMMANDS = {"plan": (".planning.plan", "Estimate the memory per rank of a layout.")}
