"""Routes for browsers and Prometheus: the way to the console, Swagger UI without any CDN, and metrics."""

import json
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response

from ... import __version__
from ...schemas.errors import RequestError
from ...workers.protocol.plugins import plugin_rows
from .services import ServicesDependency

router = APIRouter(include_in_schema=False)

_PLACES = plugin_rows("server.console.paths", "PLACES")
_ASSETS = Path(str(files("fastapi_offline"))) / "static"
_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy for browsers. Swagger UI needs inline styles, and its stylesheet has images as data: URLs."""
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}

_DOCS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trainhouse: the API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
});
"""


@router.get("/")
async def home(request: Request) -> Response:
    """Sends browsers to the console, or to the documentation without it, and JSON to other clients."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(_PLACES.get("home", "/docs"), 303, headers={"Vary": "Accept"})
    places = {"docs": "/docs", "openapi": "/openapi.json", "health": "/api/v1/healthz", "ready": "/api/v1/readyz"}
    return JSONResponse({"name": "trainhouse", "version": __version__, **places}, headers={"Vary": "Accept"})


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Returns the OpenAPI document, which is encoded once: the route needs no key."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = json.dumps(request.app.openapi()).encode()
    return Response(state.openapi, media_type="application/json")


@router.get("/docs")
async def docs() -> HTMLResponse:
    return HTMLResponse(_DOCS, headers=_HEADERS)


@router.get("/docs/start.js")
async def start() -> Response:
    return Response(_START, media_type="text/javascript", headers=_HEADERS)


@router.get("/docs/{file}")
async def asset(file: str) -> FileResponse:
    """Serves a file of Swagger UI."""
    if file not in _FILES:
        raise RequestError(f"no GET /docs/{file[:80]} here: see /docs for the endpoints", status=404)
    return FileResponse(_ASSETS / file, headers=_HEADERS)


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDependency) -> Response:
    """Returns the server's metrics for Prometheus."""
    services.telemetry.catch_up()
    body, content_type = await services.telemetry.metrics.answer(request.headers.get("Accept", ""))
    return Response(body, headers={"Content-Type": content_type})
