"""The pages for browsers: the start page and the API documentation, without resources from other hosts."""

import re
from pathlib import Path

import pytest
from trainhouse.schemas.version import VERSION
from trainhouse.server.routes.pages import FIRST_STEPS

from ..real import ALICE, Server

pytestmark = pytest.mark.anyio

README = Path(__file__).resolve().parents[3] / "README.md"
_ADDRESS = re.compile(r"""(?:src|href)="([^"]+)\"""")


@pytest.mark.parametrize("page", ["/console/sign-in", "/docs"])
async def test_pages_load_resources_only_from_this_server(server: Server, page: str) -> None:
    client = server.clients[ALICE]
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


async def test_the_start_leads_browsers_to_the_console_and_names_docs_and_health(server: Server) -> None:
    client = server.clients[ALICE]
    places = (await client.get("http://test/")).json()
    assert places["name"] == "trainhouse" and places["version"] == VERSION
    for name in ("docs", "openapi", "health", "ready"):
        assert (await client.get(f"http://test{places[name]}")).status_code == 200
    answer = await client.get("http://test/", headers={"Accept": "text/html"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    page = await client.get("http://test/console/sign-in", headers={"Accept": "text/html", "Host": 'a"><script>'})
    assert page.status_code == 200 and "<script>" not in page.text, "the Host header is escaped"


def test_the_first_steps_match_the_readme() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert FIRST_STEPS.format(url="http://127.0.0.1:8000", key="tml-local", model=model) == code
