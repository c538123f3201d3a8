"""The row of servers that share a database in the table of servers."""

from .leased_server import serve_shared

SERVERS = {"shared": serve_shared}
