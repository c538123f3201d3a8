"""Models being trained: their order, their operations, their recovery."""
