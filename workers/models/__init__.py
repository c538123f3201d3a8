"""The base model: loaded, checked, sharded, and run through packed rows."""
