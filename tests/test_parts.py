"""The parts of a gateway, as the configuration has it."""

import ssl
import weakref
from pathlib import Path

import pytest
import yaml
from support.certificates import self_signed
from support.site import POLICY

from gateway import parts, settings
from gateway.clock import SystemClock
from gateway.core.errors import ConfigError
from gateway.store.idempotency import RedisIdempotency
from gateway.store.memory import MemoryIdempotency


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


def test_a_shorter_window_has_shorter_steps_and_a_hang_is_seen_sooner(tmp_path: Path) -> None:
    push = {"url": "http://b", "profile": "h100-tp2-push"}
    limited = push | {"url": "http://c", "limits": {"context_tokens": 32_768}}
    found = loaded(
        tmp_path, backends={"whole": push, "limited": limited}, pools={"light": ["whole", "limited"]}
    )
    hangs = {name: parts.hang_s(found, one) for name, one in found.policy().backends.items()}

    assert hangs["whole"] == pytest.approx(54, abs=0.5)  # docs/health.md
    assert hangs["limited"] == 30


def test_backends_with_equal_tls_share_a_context_until_a_file_changes(
    tmp_path: Path,
) -> None:
    self_signed(tmp_path, "gateway")
    tls = {"cert_file": "cert.pem", "key_file": "key.pem"}
    own = {"light-0": tls, "light-1": tls, "light-2": {}, "light-3": {}, "light-4": {}}
    backends = {
        name: {"url": f"https://{name}", "profile": "h100-tp1-light", "tls": one} for name, one in own.items()
    }
    backends["light-4"]["url"] = "http://light-4"
    site = loaded(tmp_path, backends=backends, pools={"light": list(own)})
    contexts = parts.TlsContexts()
    first = contexts.of(site)
    assert isinstance(first["light-0"], ssl.SSLContext)
    assert first["light-1"] is first["light-0"]
    assert isinstance(first["light-2"], ssl.SSLContext)
    assert first["light-3"] is first["light-2"] is not first["light-0"]
    assert first["light-4"] is True
    assert contexts.of(site) == first

    self_signed(tmp_path, "gateway")  # renewed
    renewed = contexts.of(site)
    assert renewed["light-0"] is not first["light-0"]
    assert renewed["light-1"] is renewed["light-0"]

    former = weakref.ref(first["light-0"])
    del first
    assert former() is None

    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"backend light-0: .*key.pem: No such file"):
        contexts.of(site)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("foo=1", "there is no option `foo`"),
        ("max_connections=many", "an option in it is not understood: Invalid value for 'max_connections'"),
    ],
)
@pytest.mark.parametrize("is_short", [True, False], ids=["short", "long"])
def test_an_option_of_the_store_that_there_is_not_is_refused_with_its_place(
    tmp_path: Path, option: str, says: str, is_short: bool
) -> None:
    url = f"redis://:secret@host:6379/0?{option}"
    found = loaded(tmp_path, store=url if is_short else {"url": url})
    line = 1 + (tmp_path / "gateway.yaml").read_text().partition(url)[0].count("\n")

    with pytest.raises(ConfigError) as caught:
        parts.ledger(found, "me")

    assert str(caught.value).startswith(f"{found.path}:{line}:")
    assert f": store.url: {says}" in str(caught.value)
    assert "secret" not in str(caught.value)
