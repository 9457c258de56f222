"""A gateway ends, whatever its threads do."""

from pathlib import Path

import anyio
import pytest
import yaml
from support.site import POLICY

from gateway import app, settings


async def test_a_gateway_ends_though_no_thread_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "CLOSE_S", 0.1)
    file = tmp_path / "gateway.yaml"
    fleet = {
        "backends": {"light-0": {"url": "http://127.0.0.1:9", "profile": "h100-tp1-light"}},
        "pools": {"light": ["light-0"]},
        "models": {"m": {"classes": [{"class": "c", "pools": ["light"]}]}},
    }
    file.write_text(yaml.safe_dump({**POLICY, **fleet, "reload": {"watch": False}}))
    limiter = anyio.to_thread.current_default_thread_limiter()
    takers = [object() for _ in range(int(limiter.available_tokens))]
    with anyio.fail_after(20):
        async with app.Gateway(settings.load(file), {}).running():
            for taker in takers:
                limiter.acquire_on_behalf_of_nowait(taker)
    for taker in takers:
        limiter.release_on_behalf_of(taker)
