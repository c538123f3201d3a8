"""The console's rows in the tables of a server."""

from . import data, events, listings, operators, playground, runs, sign_in
from .browser_gate import check_browser
from .paths import CONSOLE

ROUTERS = {pages.__name__: pages.router for pages in (sign_in, runs, events, listings, playground, data, operators)}
GATES = {CONSOLE: check_browser}
"""Checks of requests below a path, before those of the gate."""
