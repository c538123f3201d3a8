"""Which work goes to the ranks of a group next, and what becomes of it when they die."""
