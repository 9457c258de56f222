"""Calls by a web page in a real browser, from an origin of its own, to a gateway with keys.

The page is one that a simulated backend shows: another port is another origin.
"""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.browser import Page, browser
from support.site import Site, simulated, site

FLEET = simulated({"light": "h100-tp1-light"})
KEYS = {"web": {"sha256": sha256(b"web").hexdigest()}}
CLASSES: list[dict[str, Any]] = [{"class": "short_chat", "pools": ["light"]}]
CALL = """async (url, path, key, body) => {
  const headers = { authorization: `Bearer ${key}`, "x-stainless-lang": "js" };
  if (body) headers["content-type"] = "application/json";
  try {
    const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const answer = await fetch(url + path, { headers, ...options });
    const names = ["x-gateway-backend", "x-request-id", "retry-after"];
    const shown = Object.fromEntries(names.map((name) => [name, answer.headers.get(name)]));
    return { status: answer.status, ...shown, text: await answer.text() };
  } catch (error) {
    return { status: 0, text: String(error) };
  }
}"""


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Site, Page]]:
    async with AsyncExitStack() as stack:
        (tmp_path / "browser").mkdir()
        page = await stack.enter_async_context(browser(tmp_path / "browser"))
        running = await stack.enter_async_context(
            site(
                tmp_path,
                fleet=FLEET,
                pools={"light": ["light"]},
                models={"gemma-4": {"classes": CLASSES}},
                keys=KEYS,
            )
        )
        await page.go(f"{running.backends['light'].url}/health")
        await page.until(f"location.origin === '{running.backends['light'].url}'")
        yield running, page


async def allow(running: Site, *origins: str) -> None:
    """Let pages of these origins call, and of no others."""
    path = running.gateway.settings.path
    document = yaml.safe_load(path.read_text()) | {"allowed_origins": list(origins)}
    assert not (await running.gateway.reloader.put(yaml.safe_dump(document).encode())).error


async def call(running: Site, page: Page, path: str, key: str = "web", **body: Any) -> dict[str, Any]:
    """Have the page call the gateway, and return what it got to see."""
    if body:
        body |= {"model": "gemma-4", "messages": [{"role": "user", "content": "hello?"}], "max_tokens": 8}
    arguments = ", ".join(map(json.dumps, (running.url, path, key, body or None)))
    found: dict[str, Any] = await page.js(f"({CALL})({arguments})")
    return found


@pytest.mark.parametrize("is_any", [False, True], ids=["its origin", "any origin"])
async def test_a_page_calls_and_sees_where_it_went(opened: tuple[Site, Page], is_any: bool) -> None:
    running, page = opened
    await allow(running, "*" if is_any else running.backends["light"].url)
    for stream in (False, True):
        got = await call(running, page, "/v1/chat/completions", stream=stream)
        assert (got["status"], got["x-gateway-backend"]) == (200, "light")
        assert got["text"].endswith("data: [DONE]\n\n") == stream
    for path, key, status in (
        ("/v1/models", "web", 200),
        ("/v1/models", "other", 401),
        ("/v1/models/other", "web", 404),
    ):
        got = await call(running, page, path, key)
        assert (got["status"], got["x-request-id"][:4]) == (status, "req-")
    assert (await call(running, page, "/v1/chat/completions", "other", stream=True))["status"] == 401


async def test_a_page_of_another_origin_sees_nothing(opened: tuple[Site, Page]) -> None:
    running, page = opened
    for origins in ((), ("https://app.example.com",)):
        await allow(running, *origins)
        for got in (
            await call(running, page, "/v1/models"),
            await call(running, page, "/v1/chat/completions", stream=False),
        ):
            assert got == {"status": 0, "text": "TypeError: Failed to fetch"}
    # No chat came: the browser had asked before.
    assert {record.status for _, record in running.gateway.journal.since(0)} == {405}
