"""The server's side of the planner: the command `plan`, and the layouts that `auto` stands for."""
