"""What crosses between processes: verbs, configurations, messages. Imports no torch."""
