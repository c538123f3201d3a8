"""Lists the scopes that give a key access to each route; any one of them is enough.

read: list and get everything of the tenant, including results and weights.
sample: sampling sessions, samples, OpenAI's endpoint.
train: models, their operations, saving.
admin: delete, publish and set the lifetime of checkpoints, revoke the key.
operator: see data about all tenants; a key has it only if `trainhouse keys create --scopes` named it. A key that also
    has admin makes and revokes keys of all tenants in the console.
"""

from collections.abc import Iterable, Iterator, Mapping

from ...schemas.errors import RequestError
from ...schemas.verbs import Verb
from ...workers.protocol.plugins import plugin_rows
from ..http.verbs import VERBS

OPERATOR = "operator"
TENANT_SCOPES = ("train", "sample", "read", "admin")
"""The scopes of a key that was created without --scopes."""
SCOPES = (*TENANT_SCOPES, OPERATOR)


def _routes_of(verb: Verb) -> Iterator[str]:
    return (f"POST /api/v1/{path}" for path in verb.paths)


_WORK = ("train", "sample")
_USE = ("train", "sample", "read")

ROUTE_SCOPES: Mapping[str, tuple[str, ...]] = {
    # Every client requests these before anything else.
    "POST /api/v1/auth/token": SCOPES,
    "GET /api/v1/auth/apikey/me": SCOPES,
    "POST /api/v1/client/config": SCOPES,
    "POST /api/v1/client/dynamic_config": SCOPES,
    "POST /api/v1/telemetry": SCOPES,
    "GET /api/v1/get_server_capabilities": SCOPES,
    "GET /api/v1/limits": SCOPES,
    "GET /api/v1/workers": (OPERATOR,),
    "GET /metrics": (OPERATOR,),
    # Sessions hold models and samplers; listing needs none.
    "POST /api/v1/create_session": _WORK,
    "POST /api/v1/session_heartbeat": _WORK,
    "POST /api/v1/sessions/{session_id}/finish": _WORK,
    "PUT /api/v1/sessions/{session_id}/project": _WORK,
    **{route: ("train",) for verb in VERBS.values() for route in _routes_of(verb)},
    "POST /api/v1/unload_model": ("train",),
    "POST /api/v1/copy_weights": ("train",),
    "POST /api/v1/import_weights": ("train",),
    "POST /api/v1/create_sampling_session": ("sample",),
    "POST /api/v1/join_sampling_session": ("sample",),
    "POST /api/v1/sample": ("sample",),
    "POST /api/v1/asample": ("sample",),
    # A key that may submit a request may also get its result, and information about its inputs.
    "POST /api/v1/retrieve_future": _USE,
    "POST /api/v1/retrieve_futures": _USE,
    "POST /api/v1/cancel_future": _WORK,
    "POST /api/v1/get_info": ("train", "read"),
    "POST /api/v1/weights_info": _USE,
    "GET /api/v1/samplers/{sampler_id}": ("sample", "read"),
    "GET /api/v1/models/{name:path}/tokenizer": _USE,
    "GET /api/v1/models/{name:path}/tokenizer/{file}": _USE,
    "GET /api/v1/training_runs": ("read",),
    "GET /api/v1/training_runs/{run_id}": ("read",),
    "GET /api/v1/training_runs/{run_id}/checkpoints": ("read",),
    "GET /api/v1/training_runs/{run_id}/metrics": ("read",),
    "POST /api/v1/training_runs/{run_id}/metrics": ("train",),
    "GET /api/v1/training_runs/{run_id}/operations": ("read",),
    "GET /api/v1/checkpoints": ("read",),
    "GET /api/v1/sessions": ("read",),
    "GET /api/v1/sessions/{session_id}": ("read",),
    "GET /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls": ("read",),
    "GET /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive": ("read",),
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}": ("admin",),
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish": ("admin",),
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish": ("admin",),
    "PUT /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": ("admin",),
    "DELETE /api/v1/auth/apikey/me": ("admin",),
    **plugin_rows("server.drafts.verbs", "SCOPES"),
    **plugin_rows("server.openai.paths", "SCOPES"),
    **plugin_rows("server.console.paths", "SCOPES"),
}


LARGE_BODIES = frozenset(
    {
        *(route for verb in VERBS.values() if verb.is_large for route in _routes_of(verb)),
        "POST /api/v1/import_weights",
        "POST /api/v1/sample",
        "POST /api/v1/asample",
        *plugin_rows("server.openai.paths", "LARGE_BODIES"),
    }
)
"""Routes that carry training and sampling data, so that their bodies may be as large as --max-body-bytes."""


def check_scopes(scopes: Iterable[str], route: str) -> None:
    """Raises RequestError 403 if none of the scopes gives access to the route."""
    needed = ROUTE_SCOPES[route]
    if not set(needed).intersection(scopes):
        listed = ", ".join(scopes)
        raise RequestError(
            f"this key has the scope{'s' if ',' in listed else ''} {listed}, and {route} needs {' or '.join(needed)}: "
            "use a key with that scope, made by `trainhouse keys create NAME --scopes "
            f"{','.join((*scopes, needed[0]))}`",
            status=403,
        )


def parse_scopes(text: str) -> tuple[str, ...]:
    """Parses "train,sample"; returns the scopes in the order of SCOPES. Raises ValueError."""
    given = {name.strip() for name in text.split(",")}
    if wrong := sorted(given.difference(SCOPES)):
        raise ValueError(f"{wrong[0]!r} is not a scope: give one or more of {','.join(SCOPES)}")
    return tuple(name for name in SCOPES if name in given)
