"""Files: append-only logs, directories that are whole or absent, object stores."""
