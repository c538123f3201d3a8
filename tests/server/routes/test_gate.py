"""Routes that bypass FastAPI answer exactly as they would through it."""

import httpx
import pytest
from fastapi import FastAPI
from trainhouse.server.routes import futures, training
from trainhouse.server.routes.gate import Gate, find_endpoints

pytestmark = pytest.mark.anyio


def through_fastapi(app: FastAPI) -> FastAPI:
    """Returns an application with the same routes and error handlers, none of which bypass FastAPI."""
    plain = FastAPI()
    for routes in (training, futures):
        plain.include_router(routes.router)
    for kind, handler in app.exception_handlers.items():
        plain.add_exception_handler(kind, handler)
    plain.add_middleware(Gate, config=app.state.services.config, endpoints={})
    plain.state.services = app.state.services
    return plain


@pytest.mark.parametrize("path", ["forward_backward", "optim_step", "retrieve_future"])
@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"X-API-Key": "tml-alice"}])
async def test_refusals_are_the_same_as_through_fastapi(app: FastAPI, path: str, headers: dict[str, str]) -> None:
    for body in (b"", b"{}", b'{"request_id": "r:1"}', b'{"model_id": "m", "seq_id": 1, "data": [], "loss_fn": "x"}'):
        answers = []
        for one in (app, through_fastapi(app)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(one), base_url="http://test") as client:
                answers.append(await client.post(f"/api/v1/{path}", content=body, headers=headers))
        ours, theirs = answers
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
        assert ours.headers == theirs.headers
        assert ours.status_code in (400, 401, 404)


async def test_other_methods_are_refused_by_fastapi(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/api/v1/retrieve_future")).status_code == 405


def test_a_name_without_a_route_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="retrieve_past"):
        find_endpoints((futures.router,), ("retrieve_future", "retrieve_past"))
