"""The language: everything that crosses HTTP, and the only code that knows its formats."""
