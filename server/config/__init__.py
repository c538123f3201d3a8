"""Configuration of a server: its knobs and how their values are parsed."""
