"""The tables of the store: one class with the queries of each."""
