"""Configuration of a server: its options and how their values are parsed."""
