"""The playground: completions and chats from any weights, with the probability of each token."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from ...schemas.bounds import MAX_PATH
from ...schemas.errors import RequestError
from ..routes.services import ServicesDependency
from .paths import CONSOLE
from .visitor import MODEL_LISTS, VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_MAX_LISTED = 200


@router.get("/playground")
async def show_playground(
    services: ServicesDependency,
    visitor: VisitorDependency,
    model: Annotated[str, Query(max_length=MAX_PATH)] = "",
) -> HTMLResponse:
    if not MODEL_LISTS:
        raise RequestError("the playground needs server/openai, which this installation lacks", status=404)
    listed = await MODEL_LISTS["openai"](services, visitor.tenant)
    live = services.samplers.live_of(visitor.tenant)
    names = {one.id: one.owned_by if one.id.startswith("tinker://") else "base model" for one in listed.data}
    names |= {one.sampler_id: f"live, {one.run_id or one.base_model}" for one in live}
    choices = dict(list(names.items())[:_MAX_LISTED])
    first = model or next(iter(services.dispatch.models))
    most = min(20, services.config.limits.max_logprobs)
    return page(visitor, "playground.html", choices=choices, model=first, num_alternatives=min(5, most))
