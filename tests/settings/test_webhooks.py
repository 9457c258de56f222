"""`webhooks` in a configuration: what it means, what is reported where, and what is never said."""

import base64
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.core.errors import ConfigError
from gateway.core.webhooks import WebhookEndpoint
from gateway.settings import CheckReport, Settings, beside, changes

Check = Callable[..., CheckReport]
Load = Callable[..., Settings]
Write = Callable[[str], Path]

SECRETS = ["whsec_" + base64.b64encode(fill * 24).decode() for fill in (b"a", b"b")]
STORE = "store: redis://127.0.0.1:6379\n"
KEYS = "keys: {nightly: {env: NIGHTLY}}\n"


def webhook(inner: str) -> str:
    return f"{STORE}{KEYS}webhooks:\n  ops: {{{inner}}}\n"


def test_a_webhook_is_an_endpoint(plain: str, loaded: Load) -> None:
    settings = loaded(webhook("url: 'https://example.com/h?t=1', secret_env: S") + plain)
    assert settings.webhooks({"S": SECRETS[0]}) == (
        WebhookEndpoint("ops", "https://example.com/h?t=1", (b"a" * 24,)),
    )


def test_everything_it_can_say(plain: str, loaded: Load) -> None:
    text = webhook(
        "url: http://10.0.0.5/, secret_env: S, events: response.failed, keys: nightly, allow_private: true"
    )
    (found,) = loaded(text + plain).webhooks({"S": SECRETS[0]})
    assert found == WebhookEndpoint(
        "ops", "http://10.0.0.5/", (b"a" * 24,), ("response.failed",), frozenset({"nightly"}), True
    )


def test_one_secret_per_line_or_word(plain: str, write: Write, loaded: Load) -> None:
    (write("").parent / "secrets").write_text("\n".join(SECRETS) + "\n")
    (by_file,) = loaded(webhook("url: https://a/, secret_file: secrets") + plain).webhooks({})
    (by_env,) = loaded(webhook("url: https://a/, secret_env: S") + plain).webhooks({"S": " ".join(SECRETS)})
    assert by_file.secrets == by_env.secrets == (b"a" * 24, b"b" * 24)


@pytest.mark.parametrize("left", ["https://a/, secret_env: S, keys: other", "https://a/, secret_env: S", ""])
def test_a_key_is_revoked_together_with_the_reference_to_it(plain: str, loaded: Load, left: str) -> None:
    text = webhook("url: https://a/, secret_env: S, keys: nightly").replace("{nightly: {env: NIGHTLY}", "{K")
    started = loaded(text.replace("K", "nightly: {env: NIGHTLY}, other: {env: OTHER}") + plain)
    after = text.replace("K", "other: {env: OTHER}").replace("https://a/, secret_env: S, keys: nightly", left)
    new = loaded((after if left else after[: after.index("webhooks:")]) + plain)
    running = beside(started, started, new)
    assert list(running.document.keys or ()) == ["other"]
    assert running.document.webhooks == started.document.webhooks  # until the restart
    assert changes(started.document, new.document, {}).now == ("key nightly is gone",)
    assert changes(started.document, new.document, {}).at_start == ("webhooks",)


def test_without_webhooks_there_are_none(plain: str, loaded: Load) -> None:
    assert loaded(plain).webhooks({}) == ()


@pytest.mark.parametrize(
    ("inner", "place", "message"),
    [
        pytest.param(
            "url: ftp://example.com/, secret_env: S", (4, 14), "write it as https://host/path", id="scheme"
        ),
        pytest.param(
            "url: https:///x, secret_env: S", (4, 14), "write it as https://host/path", id="no-host"
        ),
        pytest.param(
            "url: 'https://u:hunter2@example.com/', secret_env: S",
            (4, 14),
            "no credentials",
            id="credentials",
        ),
        pytest.param("url: 'https://a/#b', secret_env: S", (4, 14), "fragment", id="fragment"),
        pytest.param("url: https://exämple.com/, secret_env: S", (4, 14), "ASCII", id="letters"),
        pytest.param("url: 'https://a/b c', secret_env: S", (4, 14), "ASCII", id="space"),
        pytest.param(
            "url: https://127.0.0.1/, secret_env: S",
            (4, 14),
            "(loopback); `allow_private: true` allows it",
            id="loopback",
        ),
        pytest.param(
            "url: 'https://[::1]/', secret_env: S",
            (4, 14),
            "(loopback); `allow_private: true` allows it",
            id="loopback-6",
        ),
        pytest.param(
            "url: https://10.0.0.5/, secret_env: S",
            (4, 14),
            "(private); `allow_private: true` allows it",
            id="private",
        ),
        pytest.param(
            "url: https://169.254.169.254/, secret_env: S, allow_private: true",
            (4, 14),
            "webhooks are never sent to this address (a cloud's metadata service)",
            id="metadata",
        ),
        pytest.param("url: https://a/", (4, 8), "give secret_env or secret_file", id="unsigned"),
        pytest.param(
            "url: https://a/, secret_env: S, secret_file: f", (4, 8), "and not both", id="two-secrets"
        ),
        pytest.param(
            "url: https://a/, secret_env: S, events: [response.done]",
            (4, 50),
            "there is no such event",
            id="event",
        ),
        pytest.param(
            "url: https://a/, secret_env: S, events: []", (4, 49), "at least one is needed", id="no-event"
        ),
        pytest.param(
            "url: https://a/, secret_env: S, keys: [nightyl]",
            (4, 48),
            'there is no API key "nightyl" (did you mean "nightly"?)',
            id="key",
        ),
        pytest.param("secret_env: S", (4, 3), 'webhooks.ops needs "url"', id="nowhere"),
        pytest.param(
            "url: https://a/, secret_env: S, secret: x", (4, 41), 'unknown key "secret"', id="secret-in-file"
        ),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(
    plain: str, checked: Check, inner: str, place: tuple[int, int], message: str
) -> None:
    (problem,) = checked(webhook(inner) + plain).problems
    assert (problem.line, problem.column) == place
    assert message in str(problem)
    assert ("`allow_private" in str(problem)) is (
        "`allow_private" in message
    )  # it is no remedy for the others
    assert "hunter2" not in str(problem)


@pytest.mark.parametrize(
    "url",
    [
        "https://a*b/",
        "https://%41/",
        "https://[v1.x]/",
        "https://[::1]x/",
        "https://[::1%25eth0]/",
        "https://10.0.0.256/",
        "https://010.0.0.1/",
        "https://a:99999/",
        "https://a:x/",
        "https://a\\@b/",
        f"https://a/{'x' * 2048}",
    ],
)
def test_a_url_that_another_reader_might_read_otherwise_is_refused(
    plain: str, checked: Check, url: str
) -> None:
    problems = checked(webhook(f"url: '{url}', secret_env: S") + plain).problems
    assert {(problem.line, problem.column) for problem in problems} == {(4, 14)}
    assert any("webhooks.ops.url: " in problem.message for problem in problems)


@pytest.mark.parametrize(
    "url", ["http://h", "https://h_1.x-y.org:8443/a?b=%20&c", "https://[2606:2800::1]:1/", "https://h:/p"]
)
def test_a_url_that_is_accepted_is_one(plain: str, loaded: Load, url: str) -> None:
    (found,) = loaded(webhook(f"url: '{url}', secret_env: S") + plain).webhooks({"S": SECRETS[0]})
    assert httpx.URL(found.url).copy_with(host="192.0.2.1").host == "192.0.2.1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param({}, "environment variable S is not set", id="missing"),
        pytest.param({"S": "whsec_short"}, "24 to 64 random bytes", id="malformed"),
        pytest.param({"S": f"{SECRETS[0]} hunter2"}, "24 to 64 random bytes", id="one-of-two"),
    ],
)
def test_a_secret_that_is_none_is_noticed_before_the_start(
    plain: str, checked: Check, environ: dict[str, str], message: str
) -> None:
    text = webhook("url: https://a/, secret_env: S") + plain
    report = checked(text, {"NIGHTLY": "k", **environ})
    assert report.ok
    assert [(warning.line, warning.column) for warning in report.warnings] == [(4, 38)]
    assert message in str(report.warnings[0])
    assert "hunter2" not in str(report.warnings[0])
    assert report.settings is not None
    with pytest.raises(ConfigError, match=r"24 to 64|not set"):
        report.settings.require({"NIGHTLY": "k", **environ})
    with pytest.raises(ConfigError, match="webhook ops"):
        report.settings.webhooks(environ)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        pytest.param("webhooks: {ops: {url: https://a/, secret_env: S}}\n", "without `jobs`", id="no-jobs"),
        pytest.param(
            STORE + "webhooks: {ops: {url: http://example.com/, secret_env: S}}\n", "plain http", id="clear"
        ),
    ],
)
def test_what_is_doubtful(plain: str, checked: Check, text: str, warning: str) -> None:
    (found,) = checked(text + plain, {"S": SECRETS[0]}).warnings
    assert warning in found.message
