"""The connections, transactions and errors of a database, and the records and rows that it holds."""
