"""Paths of the console, and the scopes that they need. Imports nothing of the server, whose tables read it early."""

CONSOLE = "/console"
SIGN_IN = f"{CONSOLE}/sign-in"

PLACES = {"home": CONSOLE, "session": f"{CONSOLE}/sessions/{{session_id}}"}
"""Pages to which the server itself leads."""

SCOPES = {
    "GET /console/runs": ("read",),
    "GET /console/compare": ("read",),
    "GET /console/events": ("read",),
    "GET /console/runs/{run_id}": ("read",),
    "GET /console/runs/{run_id}/operations": ("read",),
    "GET /console/runs/{run_id}/checkpoints": ("read",),
    "GET /console/runs/{run_id}/metrics.csv": ("read",),
    "GET /console/sessions": ("read",),
    "GET /console/sessions/{session_id}": ("read",),
    "GET /console/checkpoints": ("read",),
    "GET /console/checkpoints/{run_id}/{kind}/{name}": ("read",),
    "GET /console/playground": ("sample",),
    "GET /console/data": ("read",),
    "POST /console/data": ("read",),
    "GET /console/capacity": ("operator",),
    "GET /console/admin": ("operator",),
    # These need the scope admin, too.
    "POST /console/admin/keys": ("operator",),
    "POST /console/admin/keys/{key_id}/revoke": ("operator",),
}
