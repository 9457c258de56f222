"""Errors: each with its place and its suggestion, and all of them at once."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.core.errors import ConfigError
from gateway.settings import CheckReport, beside, check, load
from gateway.settings.problems import Known, Problem, closest

Check = Callable[..., CheckReport]
Write = Callable[[str], Path]

BAD = """\
listen: 8080
admni: 127.0.0.1:9090
backends:
  light-0: {url: http://127.0.0.1:9001/v1, profile: h100-tp1-ligth}
  push: {url: http://127.0.0.1:9002, profile: h100-tp2-push, knee_seqs: 4, limits: {kv_budget: 3}}
pools:
  light: [light-0, ligt-0]
models:
  gemma-4:
    classes:
      - {class: reasoning, when: {prompt_token: ">= 16000"}, pools: [lihgt]}
      - {class: short_chat}
"""


def test_every_problem_is_reported_at_once_with_its_place(checked: Check) -> None:
    found = [
        (problem.line, problem.column, str(problem).split(": ", 1)[1]) for problem in checked(BAD).problems
    ]
    assert found == [
        (
            1,
            1,
            'the file needs "tokenizer": How prompts are counted: {vocab: FILE} exactly, '
            "`approximate` with a band. There is no default",
        ),
        (1, 9, "listen: write it as host:port, such as 127.0.0.1:8080"),
        (2, 1, 'unknown key "admni" (did you mean "admin"?)'),
        (4, 18, "backends.light-0.url: leave /v1 out: the gateway appends it"),
        (4, 53, 'there is no profile "h100-tp1-ligth" (did you mean "h100-tp1-light"?)'),
        (5, 62, 'unknown key "knee_seqs" in backends.push (did you mean "limits: {knee_seqs: ...}"?)'),
        (5, 96, "backends.push.limits.kv_budget: it must be less than or equal to 1, not 3"),
        (7, 20, 'there is no backend "ligt-0" (did you mean "light-0"?)'),
        (
            11,
            35,
            'unknown key "prompt_token" in models.gemma-4.classes[0].when (did you mean "prompt_tokens"?)',
        ),
        (11, 70, 'there is no pool "lihgt" (did you mean "light"?)'),
        (
            12,
            9,
            'models.gemma-4.classes[1] needs "pools": '
            "Pool ids, first choice first; the later ones are the spill order",
        ),
    ]


def test_a_missing_space_after_a_key_is_named_and_its_value_is_not_repeated(checked: Check) -> None:
    """YAML then takes both for one key without a value."""
    problems = checked("backends:\n  a: {url:http://user:secret@h:1, profile:generic}\n").problems
    told = [str(problem).split(": ", 1)[1] for problem in problems if problem.line == 2]
    assert 'put a space after "url:"' in told
    assert 'put a space after "profile:"' in told
    assert not any("secret" in one for one in told)


def test_load_raises_with_every_problem_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert str(caught.value).splitlines() == [str(problem) for problem in check(path, {}).problems]
    assert str(caught.value).splitlines()[2].startswith(f"{path}:2:1: ")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("https://a.example/", "without even a slash: write https://a.example"),
        ("https://A.example:8443/app", "without even a slash: write https://a.example:8443"),
        ("https://a.example?b", "without even a slash: write https://a.example"),
        ("https://a.example:443", "leave the usual port of a scheme out: write https://a.example"),
        ("http://[::1]:80", "leave the usual port of a scheme out: write http://[::1]"),
        ("'https://a.example:'", "leave the usual port of a scheme out: write https://a.example"),
        ("a.example", "begins with its scheme; write it as https://host"),
        ("localhost:3000", "begins with its scheme"),
        ("//a.example", "begins with its scheme"),
        ("https:a.example", "begins with its scheme"),
        ("https://", "begins with its scheme"),
        ("'null'", "begins with its scheme"),
        ("''", "begins with its scheme"),
        ("https://*.example", "there are no patterns: name each origin"),
        ("https://me:secret@a.example", "no credentials"),
        ("https://b\u00fccher.example", "others as xn--"),
        ("https://a.example:99999", "this is not an origin"),
        ("'https://[::1'", "this is not an origin"),
        ("7", "text is needed; put it in quotes"),
        ("{url: https://a.example}", "text is needed, not a mapping"),
        ("[https://a.example]", "text is needed, not a list"),
    ],
)
def test_what_is_no_origin(checked: Check, plain: str, written: str, message: str) -> None:
    (problem,) = checked(f"allowed_origins:\n  - {written}\n{plain}").problems
    assert message in problem.message
    assert (problem.line, problem.column) == (2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            ("tokenizer: approximate", "tokenizer: exact"), "write approximate, or", id="tokenizer-word"
        ),
        pytest.param(
            ("tokenizer: approximate", "tokenizer: {vocab: }"), "name the vocabulary", id="vocab-empty"
        ),
        pytest.param(
            ("tokenizer: approximate", "tokenizer: {}"), "name the vocabulary", id="tokenizer-empty"
        ),
        pytest.param(("http://127.0.0.1:9001", "127.0.0.1:9001"), "write it as http://", id="no-scheme"),
        pytest.param(("http://127.0.0.1:9001", "ftp://host"), "write it as http://", id="wrong-scheme"),
        pytest.param(
            ("http://127.0.0.1:9001", "'http://h/api?a=b'"), "only scheme, host, port", id="a-query"
        ),
        pytest.param(("http://127.0.0.1:9001", "'http://h?'"), "only scheme, host", id="an-empty-query"),
        pytest.param(("http://127.0.0.1:9001", "'http://h/#'"), "only scheme, host", id="an-empty-fragment"),
        pytest.param(("http://127.0.0.1:9001", "http://host/a b"), "a path consists of", id="a-space"),
        pytest.param(("http://127.0.0.1:9001", "http://host/a/../b"), "a path consists of", id="dots"),
        pytest.param(("http://127.0.0.1:9001", "http://host//a"), "a path consists of", id="two-slashes"),
        pytest.param(("http://127.0.0.1:9001", "http://host/a%2"), "a path consists of", id="half-an-escape"),
        pytest.param(("http://127.0.0.1:9001", "http://host/a/v1/"), "leave /v1 out", id="v1-below-a-path"),
        pytest.param(
            ("http://127.0.0.1:9001", "http://h/v1/chat/completions"), "leave /v1", id="an-endpoint"
        ),
        pytest.param(("http://127.0.0.1:9001", "'http://a,b:9001'"), "a host has letters", id="two-hosts"),
        pytest.param(("http://127.0.0.1:9001", "'http://host '"), "a blank at its end", id="a-blank-behind"),
        pytest.param(("http://127.0.0.1:9001", "' http://host'"), "or beginning", id="a-blank-before"),
        pytest.param(("http://127.0.0.1:9001", '"http://ho\\nst"'), "a line break in it", id="a-line-break"),
        pytest.param(("http://127.0.0.1:9001", "http://bücher:9001"), "as xn--", id="an-umlaut"),
        pytest.param(("http://127.0.0.1:9001", "http://host:99999"), "this is not a URL", id="port-too-high"),
        pytest.param(
            ("http://127.0.0.1:9002", "http://127.0.0.1:9001/"), "has the URL of light", id="same-server"
        ),
        pytest.param(
            (
                "http://127.0.0.1:9001, profile: h100-tp1-light}",
                "http://h/a, profile: h100-tp1-light}\n  again: {url: http://H:80/a/, profile: generic}",
            ),
            "again has the URL of light",
            id="same-path",
        ),
        pytest.param(
            ("http://127.0.0.1:9001", "http://localhost:8080/a"),
            "the gateway itself (`listen`)",
            id="a-path-on-itself",
        ),
        *(
            pytest.param(
                ("http://127.0.0.1:9002", f"'http://{name}:9001'"), "has the URL of light", id=f"same-{name}"
            )
            for name in ("localhost", "LOCALHOST.", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")
        ),
        pytest.param(
            ("http://127.0.0.1:9001", "http://localhost:8080"), "the gateway itself (`listen`)", id="itself"
        ),
        pytest.param(
            ("backends:\n", "admin: 0.0.0.0:9001\nbackends:\n"),
            "the gateway itself (`admin`)",
            id="its-own-admin-port",
        ),
        pytest.param(("light: {url", "li ght: {url"), "letters, digits", id="backend-name"),
        pytest.param(
            ("class: image", 'class: "image\\n"'), "letters, digits", id="a-line-break-after-a-name"
        ),
        pytest.param(
            ("profile: h100-tp1-light", "profile: h100"), "there are generic, h100-tp1-light,", id="profile"
        ),
        pytest.param(("  light: [light]", "  light: [light, light]"), "listed twice", id="backend-twice"),
        pytest.param(("  light: [light]", "  light: []"), "at least one is needed", id="empty-pool"),
        pytest.param(
            ("  light: [light]", "  light: light"), "a list of backends is needed: [light]", id="pool-as-text"
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {images: 1.5}}"), "not a comparison", id="condition"
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {header: {Authorization: x}}}"),
            "removed before requests are classified",
            id="header-with-a-secret",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {header: {X-Team A: x}}}"),
            "no header can have this name",
            id="header-with-a-space",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {header: {X-Team: a, x-team: b}}}"),
            "X-Team and x-team are one header",
            id="header-in-two-cases",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {key: bob}}"), "no API key", id="key-without-keys"
        ),
        pytest.param(
            ("h100-tp1-light}", "h100-tp1-light, quirks: {add: tool_markup_leak}}"),
            'there is no quirk "tool_markup_leak" (did you mean "tool_markup_leaks"?)',
            id="quirk",
        ),
        pytest.param(
            ("h100-tp1-light}", "h100-tp1-light, quirks: {add: text_only, remove: [text_only]}}"),
            "quirk text_only is added and removed",
            id="quirk-there-and-not",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], waiting: {max_wait_s: 9, demoted_wait_s: 8}}"),
            "cannot be below max_wait_s, 9 here",
            id="demoted-for-less",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], when: {reasoning: true}, waiting: {demoted_wait_s: 60}}"),
            "cannot be below max_wait_s, 600 here",
            id="demoted-for-less-than-by-default",
        ),
        pytest.param(
            ("[light, push]}", "[light, push], queue: {}}"), "add `jobs: {}`", id="a-queue-without-jobs"
        ),
        pytest.param(
            ("[light, push]}", "[light, push], queue: {on_disconnect: stop}}"),
            "queue.on_disconnect",
            id="another-thing-to-do-with-those-who-leave",
        ),
        pytest.param(("class: image,", "class: short_chat,"), "is listed twice", id="class-twice"),
        pytest.param(
            ("    classes:", "    aliases: [gemma-4]\n    classes:"), "already names", id="alias-twice"
        ),
        pytest.param(
            ("backends:", "profiles: {x: {extends: h200}}\nbackends:"), "no shipped profile", id="extends"
        ),
        pytest.param(("backends:", "admin: 127.0.0.1:8080\nbackends:"), "the same address", id="one-address"),
        pytest.param(
            ("backends:", "listen: 0.0.0.0:8080\nadmin: 127.0.0.1:8080\nbackends:"),
            "the same address",
            id="an-address-within-all",
        ),
        pytest.param(("backends:", "admin: 9090\nbackends:"), "127.0.0.1:9090", id="port-alone"),
        pytest.param(
            ("backends:", "listen: '*:8080'\nbackends:"), "0.0.0.0:8080", id="a-star-for-everywhere"
        ),
        pytest.param(
            ("backends:", "listen: 10.0.0.256:8080\nbackends:"), "is no IP address", id="listen-nowhere"
        ),
        pytest.param(
            ("backends:", "listen: $HOST:8080\nbackends:"), "${NAME}, with braces", id="listen-no-braces"
        ),
        pytest.param(
            ("backends:", "listen: a b:8080\nbackends:"), "its host is neither a name", id="listen-with-blank"
        ),
        pytest.param(("backends:", "admin: a/b:8080\nbackends:"), "is neither a name", id="admin-with-path"),
        pytest.param(("backends:", "admin: '[zz]:8080'\nbackends:"), "is neither a name", id="no-v6-address"),
        pytest.param(
            ("backends:", f"listen: a:{'9' * 5000}\nbackends:"), "write it as host:port", id="a-long-port"
        ),
        pytest.param(
            ("backends:", "store: redis://$HOST:6379\nbackends:"),
            "${NAME}, with braces",
            id="store-no-braces",
        ),
        pytest.param(
            ("backends:", "store: redis://a b:6379\nbackends:"), "its host is neither", id="store-with-blank"
        ),
        pytest.param(
            ("backends:", "store: redis://10.0.0.256\nbackends:"), "is no IP address", id="store-nowhere"
        ),
        pytest.param(
            ("  gemma-4:", "  ${MODEL}:"), "${NAME} is replaced in values only", id="a-variable-as-key"
        ),
        pytest.param(("backends:", "listen: ::1:8080\nbackends:"), "[::1]:8080", id="v6-without-brackets"),
        pytest.param(
            ("backends:", "health: {failures: true}\nbackends:"), "a number is needed", id="true-as-number"
        ),
        pytest.param(("backends:", "health: {failures: 1.5}\nbackends:"), "whole number", id="fraction"),
        pytest.param(("backends:", "health: {hang_s: .inf}\nbackends:"), "finite number", id="infinite"),
        pytest.param(
            ("backends:", "health: {hang_s: 30s}\nbackends:"),
            "must be a number of seconds, not '30s'",
            id="seconds-with-a-unit",
        ),
        pytest.param(
            ("backends:", "requests: {max_body_bytes: 32MB}\nbackends:"),
            "must be a whole number of bytes, not '32MB'",
            id="bytes-with-a-unit",
        ),
        pytest.param(
            ("9001,", "9001, boot_budget_s: 5min,"),
            "must be a number of seconds, not '5min'",
            id="minutes",
        ),
        pytest.param(
            ("backends:", "routing: {attempts_max: 0}\nbackends:"), "greater than or equal", id="no-attempt"
        ),
        pytest.param(("backends:", "listen:\nbackends:"), "listen: a value is missing", id="a-missing-value"),
        pytest.param(
            ("backends:", "decisions: x.jsonl\nbackends:"),
            "a mapping of keys to values is needed (known here: file, files, ",
            id="text-for-a-section",
        ),
        pytest.param(
            ("backends:", "health: {interval_s: 0}\nbackends:"), "greater than 0", id="zero-in-the-message"
        ),
        pytest.param(
            ("backends:", "reload: {watch: 7}\nbackends:"), "must be true or false, not 7", id="seven"
        ),
        pytest.param(
            ("9001,", "9001, limits: {knee_seqs: 1.5},"),
            "a whole number or a list is needed",
            id="half-seq",
        ),
        pytest.param(("9001,", "9001, knee: 4,"), 'did you mean "limits: {knee_seqs: ...}"', id="other-name"),
        pytest.param(
            ("9001,", "9001, limits: {max_model_len: 4},"), 'did you mean "context_tokens"', id="name-of-vllm"
        ),
        pytest.param(("127.0.0.1:9001", "$HOST:9001"), "written as ${NAME}, with braces", id="no-braces"),
        pytest.param(("backends:", "\tbackends:"), "indent with spaces; this is a tab", id="a-tab"),
        pytest.param(
            ('">= 16000"', ">= 16000"), 'put this value in quotes, such as ">= 16000"', id="no-quotes"
        ),
        pytest.param(
            ("backends:", "x:\n  prompt_tokens: >= 16000\nbackends:"),
            'put this value in quotes, such as ">= 16000"',
            id="no-quotes-on-a-line-of-its-own",
        ),
        pytest.param(
            ("backends:", "allowed_origins: *\nbackends:"),
            'put this value in quotes, such as "*"',
            id="star-without-quotes",
        ),
        pytest.param(("backends:", "store: !x\nbackends:"), "put this value in quotes", id="a-tag"),
        pytest.param(
            ("backends:", "listen:127.0.0.1:80\nbackends:"),
            "there is no colon, with a space behind it, after the key in line 2",
            id="no-space-behind-the-colon",
        ),
        pytest.param(
            ("backends:", "backends"),
            "there is no colon, with a space behind it, after the key in line 2",
            id="no-colon",
        ),
        pytest.param(
            ("backends:", "x:\n  y:\n    - 1\n   - 2\nbackends:"),
            "this line is not indented like those before it",
            id="an-entry-further-left",
        ),
        pytest.param(
            ("backends:", "x:\n  y: 1\n  - 2\nbackends:"),
            "this line is not indented like those before it",
            id="an-entry-among-keys",
        ),
        pytest.param(
            ("backends:", 'listen: "127.0.0.1":80\nbackends:'),
            "put the whole value in quotes",
            id="something-behind-the-quotes",
        ),
        pytest.param(
            ("backends:", "allowed_origins: - a\nbackends:"),
            "begin a list on a line of its own",
            id="a-list-behind-its-key",
        ),
        pytest.param(
            ("backends:", 'store: "C:\\data"\nbackends:'), "write a backslash twice", id="a-backslash"
        ),
        pytest.param(("9001,", "9001,,"), "a value is missing here", id="two-commas"),
        pytest.param(("backends:", "keys:\nbackends:"), "name at least one key", id="keys-all-commented-out"),
        pytest.param(("backends:", "keys: {a: {}}\nbackends:"), "exactly one of", id="key-of-nothing"),
        pytest.param(
            ("backends:", "keys: {a: {sha256: beef  -}}\nbackends:"), "without the `-`", id="no-digest"
        ),
        pytest.param(
            ("backends:", "keys: {a: {env: A, file: b}}\nbackends:"), "exactly one of", id="key-twice"
        ),
        pytest.param(("9001,", "9001, api_key_env: A, api_key_file: b,"), "not both", id="two-backend-keys"),
        pytest.param(("9001,", "9001, limits: {knee_seqs: 0},"), "greater than or equal to 1", id="no-knee"),
        pytest.param(
            ("9001,", "9001, limits: {knee_seqs: 1000},"), "less than 1000", id="knee-beyond-counting"
        ),
        pytest.param(("9001,", "9001, limits: {knee_seqs: []},"), "the last step", id="empty-curve"),
        pytest.param(
            ("9001,", '9001, limits: {knee_seqs: [{prompt_tokens: "<= 9", seqs: 4}]},'),
            "the last step",
            id="a-curve-that-ends",
        ),
        pytest.param(
            ("9001,", '9001, limits: {knee_seqs: [{prompt_tokens: "> 9", seqs: 4}, {seqs: 1}]},'),
            'write it as "<= 2000"',
            id="a-lower-end",
        ),
        pytest.param(
            (
                "9001,",
                '9001, limits: {knee_seqs: [{prompt_tokens: "<= 9", seqs: 4}, '
                '{prompt_tokens: "<= 9", seqs: 2}, {seqs: 1}]},',
            ),
            "from short prompts to long",
            id="a-curve-that-stands-still",
        ),
        pytest.param(
            ("backends:", "requests: {drop_fields: [priority, model]}\nbackends:"),
            "requests.drop_fields: the gateway itself needs model",
            id="a-field-that-is-needed",
        ),
        pytest.param(
            ("backends:", "store: {url: redis://h, prefix: 'a b'}\nbackends:"),
            "store.prefix: a prefix is 1 to 32 letters",
            id="a-prefix-with-a-blank",
        ),
        pytest.param(
            ("backends:", "listen: 127.0.0.1:9090\nbackends:"),
            "gateway.yaml:2:9: admin and",
            id="one-address-that-is-given",
        ),
        pytest.param(
            (
                "backends:",
                "profiles: {x: {extends: h100-tp1-light, "
                "perf: {t_fixed: 0, t_mem: 0, kv_read: 0, kv_span: 0, t_seq: 0}}}\nbackends:",
            ),
            "takes no time; set `t_fixed` or `t_mem`",
            id="an-engine-without-time",
        ),
        pytest.param(
            ("backends:", "profiles: {x: {extends: h100-tp1-light, perf: {accept: 0}}}\nbackends:"),
            "perf.accept.value: it must be greater than or equal to 1",
            id="no-token-per-step",
        ),
        pytest.param(
            ("backends:", "profiles: {x: {extends: h100-tp1-light, perf: {t_tok: 1.0e+300}}}\nbackends:"),
            "less than or equal to 1000",
            id="more-seconds-than-can-be-added",
        ),
        pytest.param(
            ("backends:", "routing: {weights: {speed: 1.0e+308}}\nbackends:"),
            "less than or equal to 1000000",
            id="more-weight-than-can-be-added",
        ),
        pytest.param(("backends:", "backends: 5\nx:"), "a mapping of keys", id="a-number-as-section"),
    ],
)
def test_each_mistake_has_its_own_words(
    checked: Check, plain: str, change: tuple[str, str], message: str
) -> None:
    bent = plain.replace(*change, 1)
    assert bent != plain
    report = checked(bent)
    assert not report.ok
    assert any(message in str(problem) for problem in report.problems), [str(one) for one in report.problems]
    assert all(problem.line > 0 and problem.column > 0 for problem in report.problems)


@pytest.mark.parametrize("total_s", [9, 90])
def test_a_late_request_may_wait_as_long_as_any_other_and_longer(
    checked: Check, plain: str, total_s: int
) -> None:
    waiting = f"[light, push], waiting: {{max_wait_s: 9, demoted_wait_s: {total_s}}}}}"

    assert checked(plain.replace("[light, push]}", waiting)).ok


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("http://127.0.0.1:9001", "http://user:hunter2@host"), id="password-in-a-url"),
        pytest.param(("http://127.0.0.1:9001", "hunter2"), id="a-secret-for-a-url"),
        pytest.param(("backends:", "keys: {a: hunter2}\nbackends:"), id="a-key-in-plain"),
        pytest.param(("backends:", "keys: {a: {sha256: hunter2}}\nbackends:"), id="a-key-for-its-digest"),
        pytest.param(("9001,", "9001, api_key_env: 8150162342,"), id="a-key-for-its-variable"),
        pytest.param(
            ("backends:", "webhooks: {ops: {url: https://a/, secret_env: 8150162342}}\nbackends:"),
            id="a-signing-key-for-its-variable",
        ),
        pytest.param(
            ("backends:", "telemetry: {otlp: {endpoint: http://host, headers_env: 8150162342}}\nbackends:"),
            id="headers-for-their-variable",
        ),
        pytest.param(
            ("backends:", "boxes: {b: {backends: {push: {http: {token_env: 8150162342}}}}}\nbackends:"),
            id="a-token-for-its-variable",
        ),
        pytest.param(("http://127.0.0.1:9001", "${SECRET}"), id="from-the-environment"),
        pytest.param(
            ("backends:", "store: redis://:hun/hunter2@host:6379\nbackends:"), id="a-slash-in-a-password"
        ),
        pytest.param(
            ("backends:", "store: redis://:/hunter2@host:6379\nbackends:"), id="a-password-without-a-host"
        ),
        pytest.param(
            ("backends:", "store: redis://:a@b/hunter2@host:6379\nbackends:"), id="a-host-in-a-password"
        ),
        pytest.param(
            ("backends:", "store: 'redis://:a@b#hunter2@host:6379'\nbackends:"), id="a-hash-in-a-password"
        ),
        pytest.param(
            ("backends:", "telemetry: {otlp: {endpoint: http://u:hunter2@host}}\nbackends:"), id="a-receiver"
        ),
        pytest.param(("backends:", "allowed_origins: ['https://u:hunter2@host']\nbackends:"), id="an-origin"),
        pytest.param(
            ("backends:", "telemetry: {otlp: 'http://u:hunter2@host'}\nbackends:"), id="a-url-for-its-section"
        ),
        pytest.param(
            ("{url: http://127.0.0.1:9001, profile: h100-tp1-light}", "u:hunter2@host"),
            id="credentials-for-a-backend",
        ),
        pytest.param(("9001,", "9001, api_key:hunter2,"), id="no-blank-behind-a-key-of-another-name"),
        pytest.param(("backends:", "keys: {a:hunter2}\nbackends:"), id="no-blank-behind-the-name-of-a-key"),
        pytest.param(("backends:", "keys: {hunter2}\nbackends:"), id="a-key-without-a-name"),
        pytest.param(("{images: true}", "{key: hunter2}"), id="a-key-for-its-name"),
        pytest.param(
            (
                "backends:",
                "webhooks: {a: {url: https://a/, secret_env: S, keys: [hunter2, b]}}\n"
                "keys: {b: {env: B}}\nbackends:",
            ),
            id="a-key-for-its-name-in-a-webhook",
        ),
        pytest.param(
            (
                "backends:",
                "boxes: {b: {backends: {push: {http: {start: {body: hunter2}}}}}}\nbackends:",
            ),
            id="a-text-for-a-body",
        ),
    ],
)
def test_no_message_repeats_a_secret(checked: Check, plain: str, change: tuple[str, str]) -> None:
    report = checked(plain.replace(*change, 1), {"SECRET": "http://u:hunter2@host/v1"})
    assert not report.ok
    said = "".join(map(str, report.problems))
    assert "hunter2" not in said
    assert "8150162342" not in said


def test_a_missing_variable_is_one_problem(checked: Check, plain: str) -> None:
    (problem,) = checked(plain.replace("http://127.0.0.1:9001", '"${NOWHERE}"', 1)).problems
    assert "environment variable NOWHERE is not set" in problem.message


@pytest.mark.parametrize("password", ["hun/ter", "/hunter", "a@b/hunter", "a@b#hunter", "a@b?hunter"])
def test_a_password_that_cuts_the_url_of_the_store_short_is_found(
    checked: Check, plain: str, password: str
) -> None:
    """A server elsewhere would be asked, or none, while the gateway counts alone."""
    bent = f"store: redis://:${{PASSWORD}}@host:6379/0\n{plain}"
    (problem,) = checked(bent, {"PASSWORD": password}).problems
    assert problem.line == 1
    assert "write % as %25, / as %2F" in problem.message

    encoded = quote(password, safe="")
    assert checked(bent, {"PASSWORD": encoded}).ok


def test_the_database_of_the_store_is_a_number(checked: Check, plain: str) -> None:
    (problem,) = checked(f"store: redis://host:6379/first\n{plain}").problems
    assert "the number of a database" in problem.message


def test_a_file_that_cannot_be_read_is_a_problem_without_a_line(tmp_path: Path) -> None:
    (problem,) = check(tmp_path / "none.yaml", {}).problems
    assert str(problem) == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"


def test_a_file_that_is_no_text_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_bytes(b"tokenizer: \xff\xfe")
    (problem,) = check(path, {}).problems
    assert "not UTF-8" in str(problem)


def test_a_list_is_no_configuration(checked: Check) -> None:
    (problem,) = checked("- a\n- b\n").problems
    assert "a mapping of keys" in problem.message


def test_problems_of_text_and_of_meaning_come_together(checked: Check, plain: str) -> None:
    messages = " ".join(map(str, checked(plain + "lisen: x\ntokenizer: approximate\n").problems))
    assert "given twice, first in line 1" in messages
    assert '(did you mean "listen"?)' in messages


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        pytest.param("knee_seq", '"knee_seqs"', id="a-letter-missing"),
        pytest.param("KNEE_SEQS", '"knee_seqs"', id="another-case"),
        pytest.param("drian", '"drain"', id="letters-swapped"),
        pytest.param("colour", "", id="nothing-near"),
    ],
)
def test_suggestions_are_near_or_absent(word: str, meant: str) -> None:
    assert closest(word, ["knee_seqs", "drain", "url"]) == meant


def test_what_is_said_of_very_many_wrong_names_is_bounded() -> None:
    known = Known(f"light-{number}" for number in range(30))
    said = [known.instead_of(f"lihgt-{number}") for number in range(30)]
    assert said[:20] == [(f'"light-{number}"', "") for number in range(20)]
    assert said[20:] == [("", "")] * 10


def test_of_very_many_names_only_some_are_compared_and_listed() -> None:
    few, many = (Known(f"light-{number:03}" for number in range(count)) for count in (500, 501))
    assert few.instead_of("lihgt-007") == ('"light-007"', "")
    listed = ", ".join(f"light-{number:03}" for number in range(50))
    assert few.instead_of("x") == ("", f"; there are {listed} and 450 more")
    assert many.instead_of("lihgt-007") == ("", f"; there are {listed} and 451 more")
    assert Known(["b", "a"]).instead_of("x") == ("", "; there are a, b")
    assert Known([]).instead_of("x") == ("", "")


def test_what_a_running_gateway_cannot_take_is_said_with_its_line(write: Write, plain: str) -> None:
    started = load(write(f"listen: 127.0.0.1:7000\n{plain}"), {})
    new = load(write(plain.replace(":9002", ":7000")), {})

    with pytest.raises(ConfigError) as caught:
        beside(started, started, new)

    assert str(caught.value) == (
        f"{new.path}:4:15: together with settings that cannot change while the gateway runs: "
        "this is the gateway itself (`listen`); a backend is another server"
    )


def test_a_problem_reads_as_compilers_write_them() -> None:
    assert str(Problem("f.yaml", 3, 7, "wrong", '"right"')) == 'f.yaml:3:7: wrong (did you mean "right"?)'
    assert str(Problem("f.yaml", 0, 0, "gone")) == "f.yaml: gone"


def test_what_cannot_be_seen_in_a_name_is_shown(checked: Check, plain: str) -> None:
    bent = plain.replace("h100-tp1-light", "h100-tp1-light\xa0").replace(
        "h100-tp2-push", '"h100-tp2-push\\e\\n"'
    )
    lines = [str(problem).partition(": ")[2] for problem in checked(bent).problems]
    assert lines == [
        r'there is no profile "h100-tp1-light\xa0" (did you mean "h100-tp1-light"?)',
        r'there is no profile "h100-tp2-push\x1b\n" (did you mean "h100-tp2-push"?)',
    ]


@pytest.mark.parametrize(
    "line",
    [
        *("listen: a_b.c-d:1", "listen: bücher.local:1", "listen: '[fe80::1%eth0]:00080'"),
        *("listen: '[::ffff:127.0.0.1]:80'", "store: 'redis://:a b@h_1.c-d:6379/0'", "store: redis://[::1]"),
        *("store: 'redis://[fe80::1%25eth0]:1'", "store: redis://bücher.local"),
    ],
)
def test_addresses_that_there_are_pass(checked: Check, plain: str, line: str) -> None:
    assert checked(f"{line}\n{plain}").ok


@pytest.mark.parametrize("listener", ["listen: 127.0.0.1:0", "listen: 10.0.0.1:9001", "admin: null"])
def test_other_servers_are_not_the_gateway(checked: Check, plain: str, listener: str) -> None:
    assert checked(f"{listener}\n{plain}").ok


@pytest.mark.parametrize(
    ("written", "headers"),
    [
        pytest.param("a=b", {"a": "b"}, id="one"),
        pytest.param(" X-Key = a=b , c=", {"X-Key": "a=b", "c": ""}, id="several-with-blanks"),
        pytest.param("hunter2", None, id="no-name"),
        pytest.param("=hunter2", None, id="an-empty-name"),
        pytest.param("a=hunter2,", None, id="nothing-behind-a-comma"),
        pytest.param("a b=hunter2", None, id="a-blank-in-a-name"),
        pytest.param("a:b=hunter2", None, id="a-colon-in-a-name"),
        pytest.param("ä=hunter2", None, id="an-umlaut-in-a-name"),
        pytest.param("a=ähunter2", None, id="an-umlaut-in-a-value"),
        pytest.param("a=\thunter2\tb", None, id="a-tab-in-a-value"),
    ],
)
def test_headers_of_a_receiver(
    checked: Check, plain: str, written: str, headers: dict[str, str] | None
) -> None:
    environ = {"OTLP_HEADERS": written}
    section = "telemetry: {otlp: {endpoint: http://localhost, headers_env: OTLP_HEADERS}}\n"
    report = checked(section + plain, environ)

    assert report.settings is not None
    if headers is None:
        assert [(one.line, one.message) for one in report.unmet] == [
            (1, "headers are written as name=value,name=value")
        ]
        with pytest.raises(ConfigError, match=r"^telemetry: headers are written as name=value,name=value$"):
            report.settings.otlp_headers(environ)
    else:
        assert report.unmet == ()
        assert report.settings.otlp_headers(environ) == headers


def test_a_list_of_which_every_entry_is_wrong_is_not_called_empty(checked: Check, plain: str) -> None:
    bent = plain.replace("  light: [light]", "  light: [3]").replace("  push: [push]", "  push: []")
    found = [problem.message.partition(":")[0] for problem in checked(bent).problems]
    assert found == ["pools.light.backends[0]", "pools.push.backends"]


def test_of_several_backends_with_one_url_the_first_is_named(checked: Check, plain: str) -> None:
    third = "  third: {url: http://a.localhost:9001, profile: generic}\n"
    bent = plain.replace("pools:", f"{third}pools:", 1).replace(":9002", ":9001", 1)
    found = [problem.message.partition(";")[0] for problem in checked(bent).problems]
    assert found == ["push has the URL of light", "third has the URL of light"]


@pytest.mark.parametrize(
    ("listen", "admin", "clash"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("'[::]:8080'", "127.0.0.1:8080", True),
        ("'[::]:8080'", "'[::1]:8080'", True),
        ("0.0.0.0:8080", "'[::1]:8080'", False),
    ],
)
def test_listeners_that_exclude_each_other(
    checked: Check, plain: str, listen: str, admin: str, clash: bool
) -> None:
    assert checked(f"listen: {listen}\nadmin: {admin}\n{plain}").ok is not clash
