"""Lists the kinds of models that a rank can hold, and holds the models themselves."""
