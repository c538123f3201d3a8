"""The console's rows in the tables of a server."""

from . import admin, capacity, checkpoints, data, events, playground, runs, sessions, sign_in
from .browser_gate import BrowserGate

ROUTERS = {
    pages.__name__: pages.router
    for pages in (sign_in, runs, events, sessions, checkpoints, playground, data, capacity, admin)
}
GATES = {"browsers": BrowserGate}
