"""The console: pages for browsers at /console, over the services behind the API's routes."""

from . import admin, capacity, checkpoints, data, events, playground, runs, sessions, sign_in

CONSOLE_ROUTERS = tuple(
    pages.router for pages in (sign_in, runs, events, sessions, checkpoints, playground, data, capacity, admin)
)
