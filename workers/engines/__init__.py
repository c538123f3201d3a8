"""Engines: where sampling of a base model happens. Loads neither torch nor ray: the work is done by other processes."""
