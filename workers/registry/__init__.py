"""All kinds of models that a rank can hold, and those that it holds."""
