"""The pages for browsers: the start page and the API documentation, without resources from other hosts."""

import re

import httpx
import pytest
from trainhouse import __version__

from ..real import ALICE, Server

pytestmark = pytest.mark.anyio

_ADDRESS = re.compile(r"""(?:src|href)="([^"]+)\"""")


async def test_the_documentation_loads_resources_only_from_this_server(server: Server) -> None:
    await check_resources(server.clients[ALICE], "/docs")


async def check_resources(client: httpx.AsyncClient, page: str) -> None:
    """Requests a page and what it loads, which must all be of this server."""
    answer = await client.get(f"http://test{page}", headers={"Accept": "text/html,*/*;q=0.8"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy
    scripts = re.search(r"script-src ([^;]+)", policy)
    assert scripts and scripts[1] == "'self'" and not re.findall(r"<script>|<script [^>]*>[^<]", answer.text)
    addresses = _ADDRESS.findall(answer.text)
    assert len(addresses) >= 4 and not any("//" in each for each in addresses)
    for each in addresses:
        answer = await client.get(f"http://test/{each.removeprefix('/')}", follow_redirects=True)
        assert answer.status_code == 200, each


async def test_the_documentation_is_swagger_ui_with_our_openapi_document(server: Server) -> None:
    client = server.clients[ALICE]
    script = await client.get("http://test/docs/swagger-ui-bundle.js")
    assert script.headers["content-type"].startswith("text/javascript") and "SwaggerUIBundle" in script.text
    start = (await client.get("http://test/docs/start.js")).text
    assert 'url: "openapi.json"' in start and "validatorUrl: null" in start
    for missing in ("redoc.standalone.js", "..%2f__init__.py", "x" * 500):
        answer = await client.get(f"http://test/docs/{missing}")
        assert answer.status_code == 404 and len(answer.text) < 300


async def test_the_start_leads_browsers_to_a_page_and_names_docs_and_health(server: Server) -> None:
    client = server.clients[ALICE]
    places = (await client.get("http://test/")).json()
    assert places["name"] == "trainhouse" and places["version"] == __version__
    for name in ("docs", "openapi", "health", "ready"):
        assert (await client.get(f"http://test{places[name]}")).status_code == 200
    answer = await client.get("http://test/", headers={"Accept": "text/html"}, follow_redirects=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
