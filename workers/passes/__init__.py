"""A pass over the model: the operations of many runs, forward and backward together."""
