"""Warnings: each doubtful thing is named, and a good file has none."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.certificates import self_signed

from gateway import profiles
from gateway.settings import CheckReport
from gateway.settings.advice import kv_tokens

Check = Callable[..., CheckReport]

CHAT = "      - {class: short_chat, pools: [light, push]}"


def test_a_good_file_has_no_warning(checked: Check, plain: str) -> None:
    report = checked(plain)
    assert report.ok
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        pytest.param(
            (CHAT, CHAT.replace("[light, push]", "light")),
            13,
            "class short_chat admits prompts of up to 15,999 tokens with any max_tokens; its largest backend "
            "(light) holds 32,768 tokens",
            id="a-class-whose-pools-are-too-short",
        ),
        pytest.param(
            (
                '{prompt_tokens: ">= 16000"}, pools: [push]',
                '{prompt_tokens: ">= 16000, < 90000", max_tokens: "<= 4096"}, pools: [light]',
            ),
            12,
            "class long_document admits requests of up to 94,095 tokens",
            id="a-class-with-an-upper-end",
        ),
        pytest.param(
            ('">= 16000"', '">= 300000"'),
            12,
            "class long_document begins at 300,000 tokens, above every window",
            id="a-threshold-above-every-window",
        ),
        pytest.param(
            ('">= 16000"', '">= 16000, < 100"'), 12, "class long_document never matches", id="a-contradiction"
        ),
        pytest.param(
            (CHAT, f"{CHAT}\n      - {{class: reasoning, when: {{reasoning: true}}, pools: [push]}}"),
            14,
            "class reasoning is never reached: everything it admits already matches class short_chat",
            id="a-class-behind-one-that-takes-everything",
        ),
        pytest.param(
            (
                CHAT,
                f'      - {{class: book, when: {{total_tokens: ">= 16000", prompt_tokens: ">= 20000"}}, '
                f"pools: [push]}}\n{CHAT}",
            ),
            13,
            "class book is never reached: everything it admits already matches class long_document",
            id="a-class-behind-a-wider-one",
        ),
        pytest.param(
            (CHAT, CHAT.replace("pools", "when: {stream: true}, pools")),
            13,
            "requests that match no class of gemma-4 are refused",
            id="no-class-for-the-rest",
        ),
        pytest.param(
            ("when: {images: true}, pools: [light]", "when: {stream: true}, pools: [push]"),
            11,
            "class image admits images, which none of its backends (push) takes",
            id="images-to-a-text-only-pool",
        ),
        pytest.param(
            ("when: {images: true}", "when: {audio: true}"),
            11,
            "class image is for audio, which no backend takes",
            id="a-class-for-what-nothing-takes",
        ),
        pytest.param(
            (CHAT, CHAT.replace("pools", "output_reserve_tokens: 300000, pools")),
            13,
            "reserves 300,000 tokens of output",
            id="a-reserve-above-the-window",
        ),
        pytest.param(
            ("  push: [push]", "  push: [push]\n  spare: [push]"),
            8,
            "pool spare is in no class",
            id="an-unused-pool",
        ),
        pytest.param(
            ("pools:", "  spark: {url: http://127.0.0.1:9, profile: spark-fp8}\npools:"),
            5,
            "backend spark is in no pool",
            id="an-unused-backend",
        ),
        pytest.param(
            ("backends:", "profiles: {hot: {extends: spark-fp8}}\nbackends:"),
            2,
            "profile hot is used by no backend",
            id="an-unused-profile",
        ),
        pytest.param(
            ("http://127.0.0.1:9002", "http://llm.example.com"),
            4,
            "backend push is reached over plain http outside this network: prompts are sent unencrypted",
            id="plain-http-far-away",
        ),
        pytest.param(
            ("http://127.0.0.1:9002", "http://8.8.8.8"), 4, "over plain http", id="plain-http-to-an-address"
        ),
        pytest.param(
            ("h100-tp1-light}", "h100-tp1-light, quirks: {add: tool_markup_leaks}}"),
            3,
            "backend light: its profile has the quirk tool_markup_leaks already",
            id="a-quirk-it-has",
        ),
        pytest.param(
            ("h100-tp1-light}", "h100-tp1-light, quirks: {remove: text_only}}"),
            3,
            "backend light: its profile has no quirk text_only to remove",
            id="a-quirk-it-has-not",
        ),
        pytest.param(
            ("h100-tp1-light}", "h100-tp1-light, quirks: {add: slow_decode}}"),
            3,
            "backend light: the gateway has no remedy for the quirk slow_decode",
            id="a-quirk-without-a-remedy",
        ),
        pytest.param(("9002,", "9002, tls: {verify: true},"), 4, "tls has no effect", id="tls-without-https"),
        pytest.param(
            ("http://127.0.0.1:9002,", "https://push.example.com, tls: {verify: false},"),
            4,
            "its certificate is not checked",
            id="unchecked-certificate",
        ),
        pytest.param(
            ("9001,", "9001, limits: {kv_blocks: 6000},"),
            3,
            "its KV budget holds a request of",
            id="kv-below-the-window",
        ),
        pytest.param(
            ("backends:", "timeouts: {total_s: 60}\nbackends:"), 2, "total_s ends an attempt", id="timeouts"
        ),
        pytest.param(
            ("backends:", "telemetry: {metrics: {interval_s: 9}}\nbackends:"),
            2,
            "metrics without `otlp`: nothing is sent",
            id="metrics-for-nobody",
        ),
        pytest.param(
            ("backends:", "jobs:\nbackends:"), 2, "`jobs` is empty: there are no jobs", id="jobs-of-nothing"
        ),
        pytest.param(
            ("backends:", "admin:\nbackends:"), 2, "`admin` is empty: there is no", id="an-empty-admin"
        ),
        pytest.param(
            ("backends:", "telemetry: {otlp: {endpoint: 'http://h'}, metrics: }\nbackends:"),
            2,
            "`telemetry.metrics` is empty: no metrics are sent",
            id="empty-metrics",
        ),
        pytest.param(
            (CHAT, CHAT.replace("}", ", queue: }")),
            13,
            "the `queue` of class short_chat is empty",
            id="an-empty-queue",
        ),
        pytest.param(("backends:", "listen: 0.0.0.0:80\nbackends:"), 2, "no `keys`", id="open-to-everyone"),
        pytest.param(
            ("backends:", "allowed_origins: ['*']\nbackends:"),
            2,
            "any web page may use it",
            id="open-to-every-page",
        ),
        pytest.param(
            ("backends:", "admin: 0.0.0.0:81\nbackends:"), 2, "the admin address", id="admin-exposed"
        ),
        pytest.param(
            ("backends:", "store: redis://:geheim@h:6379/0\nbackends:"),
            2,
            "the store's password is in this file",
            id="a-password-in-the-file",
        ),
        pytest.param(
            ("backends:", "store:\n  url: redis://h:6379/0?password=geheim\nbackends:"),
            3,
            "the store's password is in this file",
            id="a-password-in-an-option",
        ),
        pytest.param(
            ("backends:", "store: redis://:geheim@${HOST:-h}:6379/0\nbackends:"),
            2,
            "the store's password is in this file",
            id="a-password-beside-a-variable",
        ),
        pytest.param(
            ("backends:", "store: redis://:${PASSWORD:-geheim}@h:6379/0\nbackends:"),
            2,
            "the store's password is in this file",
            id="a-password-as-a-default",
        ),
        pytest.param(
            ("{class: short_chat,", "{class: short_chat, when: {prompt_tokens: },"),
            13,
            "`prompt_tokens` in the `when` of class short_chat is empty: it excludes no request",
            id="a-condition-without-a-value",
        ),
    ],
)
def test_what_is_doubtful_is_said_where_it_stands(
    checked: Check, plain: str, change: tuple[str, str], line: int, message: str
) -> None:
    bent = plain.replace(*change, 1)
    assert bent != plain
    report = checked(bent)
    assert report.ok, [str(problem) for problem in report.problems]
    found = [warning for warning in report.warnings if message in warning.message]
    assert found, [str(warning) for warning in report.warnings]
    assert found[0].line == line


@pytest.mark.parametrize(
    "store",
    [
        "redis://:${PASSWORD}@h:6379/0",
        "{url: 'redis://:${PASSWORD}@h:6379/0'}",
        "redis://${USER:-gateway}:${PASSWORD:-}@h:6379/0?password=${PASSWORD}",
        "${STORE:-redis://h:6379/0}",
    ],
)
def test_a_password_from_the_environment_is_no_warning(checked: Check, plain: str, store: str) -> None:
    report = checked(plain.replace("backends:", f"store: {store}\nbackends:", 1), {"PASSWORD": "geheim"})

    assert report.ok
    assert report.warnings == ()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3", "192.168.0.4", "[fd00::1]", "localhost", "push", "push.internal", "gw.ns.svc"],
)
def test_inside_the_network_plain_http_is_no_warning(checked: Check, plain: str, host: str) -> None:
    assert checked(plain.replace("127.0.0.1:9002", f"{host}:9002")).warnings == ()


def test_nothing_is_said_about_what_no_backend_of_the_fleet_could_do(checked: Check) -> None:
    alone = (
        "tokenizer: approximate\nbackends: {b: {url: http://127.0.0.1:1, profile: spark-nvfp4}}\n"
        "pools: {p: [b]}\nmodels: {m: {classes: [{class: c, pools: [p]}]}}\n"
    )
    assert checked(alone).warnings == ()


def test_a_class_for_images_is_compared_with_backends_that_take_them(checked: Check, plain: str) -> None:
    # light is shorter than push, but push takes no image: nothing better exists for them
    assert "class: image" in plain
    assert checked(plain).warnings == ()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        pytest.param("A" * 64, "key b is the same as key a: its callers count as b", id="twice-the-same"),
        pytest.param(hashlib.sha256(b"").hexdigest(), "the SHA-256 of empty text", id="an-empty-variable"),
    ],
)
def test_a_key_that_nobody_is_known_by(checked: Check, plain: str, second: str, message: str) -> None:
    keys = f"keys:\n  a: {{sha256: {'a' * 64}}}\n  b: {{sha256: {second}}}\n"
    (warning,) = checked(keys + plain).warnings
    assert message in warning.message
    assert warning.line == 3


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        pytest.param("batch", [], id="a-key"),
        pytest.param(
            "bach", ['no API key "bach"; nobody has this priority (did you mean "batch"?)'], id="like-a-key"
        ),
        pytest.param("other", ["no API key of this name; nobody has this priority"], id="no-key"),
    ],
)
def test_priorities_are_those_of_keys(checked: Check, plain: str, name: str, warnings: list[str]) -> None:
    jobs = f"keys: {{batch: {{sha256: {'a' * 64}}}}}\njobs: {{priorities: {{{name}: high}}}}\n"
    found = [str(warning) for warning in checked(jobs + plain).warnings]
    assert [line.partition(": there is ")[2] for line in found] == warnings


def test_keys_close_the_open_door(checked: Check, plain: str) -> None:
    keys = f"keys: {{a: {{sha256: '{'0' * 64}'}}}}\n"
    assert checked(f"listen: 0.0.0.0:80\nallowed_origins: '*'\n{keys}{plain}").warnings == ()


@pytest.mark.parametrize(
    ("written", "warned"),
    [
        ("profile: generic", True),
        ("profile: generic, limits: {kv_budget: 0.5}", True),
        ("profile: generic, limits: {knee_seqs: 8}", False),
        ("profile: h100-tp1-light", False),
        ("profile: ours", False),
    ],
)
def test_a_knee_that_nobody_has_said_is_a_guess(
    plain: str, checked: Check, written: str, warned: bool
) -> None:
    ours = "profiles: {ours: {extends: generic}}\n" if "ours" in written else ""
    report = checked(ours + plain.replace("profile: h100-tp1-light", written, 1))

    assert report.ok
    assert [one.message for one in report.warnings if "is a guess" in one.message] == (
        ["backend light: its knee of 16 is a guess: set `limits: {knee_seqs: ...}`"] if warned else []
    )


@pytest.mark.parametrize(
    ("perf", "said"),
    [
        ("t_mem: 18", "a single stream gets 0.13 tokens/s"),
        ("t_tok: 0.3", "prompts are read at 3.3 tokens/s"),
        ("{t_mem: 0.7, t_tok: 0.05}", None),  # a large model on a CPU
        ("{t_fixed: 0, t_mem: 0, t_tok: 0, t_attn: 0, t_seq: 0.01}", None),
    ],
)
def test_times_in_milliseconds_are_pointed_out(
    plain: str, checked: Check, perf: str, said: str | None
) -> None:
    ours = f"profiles: {{ours: {{extends: h100-tp1-light, perf: {{{perf.strip('{}')}}}}}}}\n"
    report = checked(ours + plain.replace("profile: h100-tp1-light", "profile: ours", 1))

    assert report.ok
    assert [one.message for one in report.warnings] == (
        []
        if said is None
        else [
            f"profile ours: by its figures {said}; the times in `perf` are seconds, not milliseconds",
        ]
    )
    assert [one.line for one in report.warnings] == [1] * len(report.warnings)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "0.08",
            ["pool push: no stream gets 12,500 tokens/s; tpot_target_ms is in milliseconds, not seconds"],
        ),
        ("1", []),
        ("80", []),
    ],
)
def test_a_target_in_seconds_is_pointed_out(plain: str, checked: Check, target: str, said: list[str]) -> None:
    """Such a target would be missed by every token, and the pool get the least share of its knee for good."""
    report = checked(plain.replace("push: [push]", f"push: {{backends: [push], tpot_target_ms: {target}}}"))

    assert report.ok
    assert [one.message for one in report.warnings] == said


@pytest.mark.parametrize("name", profiles.names())
def test_every_shipped_pool_holds_its_whole_window(name: str) -> None:
    capacity = profiles.load(name).capacity
    assert kv_tokens(capacity) == capacity.context_tokens


def test_a_pool_where_chats_meet_documents_is_pointed_out_unless_it_is_meant(
    plain: str, checked: Check
) -> None:
    """One pool for everything: legal, and slow for chats, so the file has to say so."""
    mixed = plain.replace("pools: [push]", "pools: [push, light]").replace(
        CHAT, CHAT.replace("light, push", "push")
    )
    assert mixed != plain
    meant = mixed.replace("push: [push]", "push: {backends: [push], gates: {long_prefills: 1}}")
    assert meant != mixed

    def said(text: str) -> list[str]:
        return [
            one.message for one in checked(text).warnings if "for chats and for long documents" in one.message
        ]

    assert len(said(mixed)) == 1
    assert said(meant) == said(plain) == []


def test_what_a_capacity_holds_is_worked_out_once() -> None:
    capacity = profiles.load("h100-tp1-light").capacity
    assert capacity.kv is not None
    looked: list[int] = []

    class Counting:
        def blocks(self, tokens: int) -> int:
            looked.append(tokens)
            return 0

    counting = replace(capacity, kv=Counting())  # type: ignore[arg-type]
    kv_tokens(counting)
    once = len(looked)
    kv_tokens(counting)
    assert len(looked) == once > 0


def test_a_missing_replacement_of_the_systems_authorities_is_told_where_it_is_used(
    checked: Check, plain: str, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path, "localhost")
    https = plain.replace("http:", "https:")
    own = https.replace("profile:", f"tls: {{ca_file: {cert}}}, profile:")
    hooks = f"{plain}jobs: {{}}\nwebhooks: {{a: {{url: https://hooks.example/a, secret_env: S}}}}\n"

    def told(text: str, **environ: str) -> list[str]:
        found = checked(text, {"S": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", **environ})
        assert found.ok
        return [one.message.replace(str(tmp_path), "") for one in found.warnings if "SSL_" in one.message]

    for text in (https, hooks):
        assert told(text, SSL_CERT_FILE="/nowhere") == ["SSL_CERT_FILE: there is no file /nowhere"]
    (nothing,) = told(https, SSL_CERT_FILE=str(key))
    assert nothing.startswith("SSL_CERT_FILE: /key.pem holds no certificates")
    assert told(https, SSL_CERT_DIR="/a:/b") == ["SSL_CERT_DIR: there is no folder /a or /b"]
    assert told(https, SSL_CERT_FILE=str(cert), SSL_CERT_DIR=f"/a:{tmp_path}") == []
    assert told(https, SSL_CERT_FILE="", SSL_CERT_DIR="") == []
    assert told(plain, SSL_CERT_FILE="/nowhere") == []
    assert told(own, SSL_CERT_FILE="/nowhere") == []
