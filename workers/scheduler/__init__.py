"""Decides which work goes to the ranks of a group next, and handles the ranks' deaths. Runs in the server's process."""
