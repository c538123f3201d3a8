"""Holds everything that crosses between processes: arguments, configurations, messages. Imports no torch."""
