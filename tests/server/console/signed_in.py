"""Browsers that are signed in to the console, without a browser: httpx keeps their cookies."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def new_browser(app: FastAPI, url: str = "http://test") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url, headers=PAGE, timeout=30)


async def sign_in(client: httpx.AsyncClient, key: str, **fields: str) -> httpx.Response:
    return await client.post("/console/sign-in", data={"key": key} | fields)


@asynccontextmanager
async def signed_in(app: FastAPI, key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with new_browser(app) as client:
        assert (await sign_in(client, key)).status_code == 303
        yield client


async def form_token(client: httpx.AsyncClient) -> dict[str, str]:
    """Returns the header with which scripts of a page send requests."""
    found = re.search(r'<meta name="form-token" content="([\w-]+)">', (await client.get("/console/runs")).text)
    assert found
    return {"X-Form-Token": found[1]}
