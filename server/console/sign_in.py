"""Routes with which browsers sign in and out, and the files that pages load."""

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ...schemas.bounds import MAX_PATH
from ...schemas.errors import RequestError
from ..http.bodies import Body, receive_body
from ..routes.services import ServicesDependency
from ..tenants.auth import address_of, presented_key
from ..tenants.browser_sessions import LIFETIME_SECONDS
from .browser_gate import cookie_name
from .paths import CONSOLE, SIGN_IN
from .templates import render, static_files, static_version
from .visitor import PAGES

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_MAX_FORM_BYTES = 16 << 10
_MAX_FIELDS = 8
_YEAR_SECONDS = 365 * 86400

FIRST_STEPS = """import trainhouse
from trainhouse import AdamParams, Datum, SamplingParams

with trainhouse.ServiceClient("{url}", "{key}") as service:
    client = service.create_lora_training_client("{model}", rank=8)
    tokenizer = client.get_tokenizer()
    tokens = tokenizer.encode("The house that trains models stands by the sea.")
    data = [Datum(tokens[:-1], {{"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}})]
    for step in range(10):
        loss = client.forward_backward(data, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=5e-4))
        print(step, loss.result().metrics["loss:sum"])
    sampler = client.save_weights_and_get_sampling_client()
    print(tokenizer.decode(sampler.sample(tokens[:3], 1, SamplingParams(max_tokens=8)).result().sequences[0].tokens))
"""
"""The same program is in README.md; those who are not signed in see it."""


@router.get("")
async def home(request: Request, services: ServicesDependency) -> Response:
    """Leads to the first page that the key's scopes permit."""
    scopes = (await services.auth.identify(presented_key(request), address_of(request))).scopes
    return RedirectResponse(next((page.path for page in PAGES if page.scope in scopes), PAGES[0].path), 303)


@router.get("/static/{version}/{file}")
async def static_file(version: str, file: str) -> Response:
    """Serves a file of the pages."""
    if file not in static_files():
        raise RequestError(f"the console has no file {file[:80]}", status=404)
    content, media_type = static_files()[file]
    # A page of another version of the server may still be open.
    kept = f"public, max-age={_YEAR_SECONDS}, immutable" if version == static_version() else "no-store"
    return Response(content, media_type=media_type, headers={"Cache-Control": kept})


@router.get("/sign-in")
async def sign_in_page(
    request: Request, services: ServicesDependency, next: Annotated[str, Query(max_length=4 * MAX_PATH)] = CONSOLE
) -> HTMLResponse:
    return await _form(request, services, next)


@router.post("/sign-in")
async def sign_in(request: Request, services: ServicesDependency) -> Response:
    """Signs the browser in with an API key, and sends it to the page that it wanted."""
    body = await receive_body(request)
    try:
        fields = _fields_of(body)
    except RequestError:
        services.auth.unauthenticated_limits.take(address_of(request))
        raise
    key, target = (fields.get(name, [""])[0].strip() for name in ("key", "next"))
    try:
        token = await services.auth.sign_in(key, address_of(request), LIFETIME_SECONDS)
    except RequestError as error:
        page = await _form(request, services, target, error.message if key else "Enter an API key.", error.status)
        if error.retry_after_seconds is not None:
            page.headers["Retry-After"] = str(round(error.retry_after_seconds))
        return page
    services.browsers.end(request.cookies.get(cookie_name(request)))
    tenant = await services.auth.authenticate(token)
    answer = RedirectResponse(target if is_page(target) else CONSOLE, 303)
    answer.set_cookie(
        cookie_name(request),
        services.browsers.begin(tenant.id, token),
        max_age=LIFETIME_SECONDS,
        path=CONSOLE,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/sign-out", status_code=204)
async def sign_out(request: Request, services: ServicesDependency) -> Response:
    """Ends the browser's session at once."""
    services.browsers.end(request.cookies.get(cookie_name(request)))
    answer = Response(status_code=204)
    answer.delete_cookie(cookie_name(request), path=CONSOLE, httponly=True, samesite="strict")
    return answer


def is_page(target: str) -> bool:
    return target.startswith(f"{CONSOLE}/") and not target.startswith(SIGN_IN) and "\\" not in target


def _fields_of(body: Body) -> dict[str, list[str]]:
    """Returns the fields of a form. Raises RequestError."""
    if body.too_large or len(body.received) > _MAX_FORM_BYTES:
        raise RequestError(f"the form is larger than {_MAX_FORM_BYTES} bytes: enter only a key", status=413)
    try:
        return parse_qs(body.received.decode(errors="replace"), max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise RequestError(f"the form has more than {_MAX_FIELDS} fields: enter only a key") from None


async def _form(
    request: Request, services: ServicesDependency, target: str, error: str = "", status: int = 200
) -> HTMLResponse:
    config, url = services.config, str(request.base_url).rstrip("/")
    is_open = await services.auth.is_open()
    # The page needs no key, so it names a model only where every key is accepted.
    model, key = (config.models.base_models[0].name, "tml-local") if is_open else ("MODEL", "KEY")
    code = FIRST_STEPS.format(url=url, key=key, model=model)
    content = {"error": error, "is_open": is_open, "url": url, "code": code}
    page = render("sign_in.html", visitor=None, next=target if is_page(target) else CONSOLE, **content)
    return HTMLResponse(page, status)
