"""Which store a gateway's parts use, as the configuration has it."""

from pathlib import Path

import pytest
import yaml
from support.site import POLICY

from gateway import parts, settings
from gateway.clock import SystemClock
from gateway.store.idempotency import MemoryIdempotency, RedisIdempotency


def loaded(folder: Path, **sections: object) -> settings.Settings:
    backends = {name: {"url": "http://b", "profile": "h100-tp1-light"} for name in ("light-0",)}
    one = {
        "pools": {"light": ["light-0"]},
        "models": {"m": {"classes": [{"class": "c", "pools": ["light"]}]}},
    }
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({**POLICY, "backends": backends, **one, **sections}))
    return settings.load(file)


@pytest.mark.parametrize(
    ("sections", "jobs_url", "kind"),
    [
        ({}, None, MemoryIdempotency),
        ({"store": "redis://r"}, None, RedisIdempotency),
        ({"jobs": {}}, "unix:///own", RedisIdempotency),
    ],
)
async def test_answers_are_kept_in_whichever_store_there_is(
    tmp_path: Path, sections: dict[str, object], jobs_url: str | None, kind: type
) -> None:
    found = loaded(tmp_path, **sections)
    if jobs_url is not None:
        found = found.with_jobs_at(jobs_url)

    assert isinstance(parts.idempotency(found, SystemClock()).store, kind)
    assert isinstance(
        parts.idempotency(found.for_worker(0, 2, "unix:///w"), SystemClock()).store, RedisIdempotency
    )
