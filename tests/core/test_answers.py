"""The five shapes of an engine's errors, and what each means."""

import json
from collections.abc import Callable

import pytest

from gateway.core.answers import (
    MESSAGE_CHARS_MAX,
    TOKENS_MAX,
    error_of,
    read_error,
    usage_of,
    verdict,
)
from gateway.core.errors import (
    BackendRejected,
    BodyRefused,
    UpstreamBusy,
    UpstreamError,
    UpstreamFailed,
    UpstreamFaulty,
)
from gateway.core.health import Outcome
from gateway.core.usage import Usage

SILENT = "The backend refused the request without saying why."


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        pytest.param(
            b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}',
            "too long",
            "input_tokens",
            id="semantic",
        ),
        pytest.param(
            b'{"error":{"message":"1 validation error","type":"Bad Request","param":"body.messages"}}',
            "1 validation error",
            "body.messages",
            id="validation",
        ),
        pytest.param(b'{"detail":"Not Found"}', "Not Found", None, id="framework"),
        pytest.param(b'{"detail":[{"loc":["body"]}]}', '[{"loc": ["body"]}]', None, id="framework-list"),
        pytest.param(b'{"error":"Unauthorized"}', "Unauthorized", None, id="a-string"),
        pytest.param(b'{"type":"error","error":{"type":"x","message":"m"}}', "m", None, id="wrapped"),
        pytest.param(b'{"object":"error","message":"old","code":400}', "old", None, id="older-engines"),
        pytest.param(b"<html>502</html>", SILENT, None, id="not-json"),
        pytest.param(b"", SILENT, None, id="empty"),
        pytest.param(b"\xff\xfe", SILENT, None, id="not-text"),
        pytest.param(b"[" * 100_000, SILENT, None, id="nested-without-end"),
        pytest.param(b'{"x": 1}', SILENT, None, id="json-without-an-error"),
    ],
)
def test_five_shapes_become_one(body: bytes, message: str, param: str | None) -> None:
    error = read_error(body)

    assert (error.message, error.param) == (message, param)


QUOTES = "1 validation error:\n {'input': 'caf\u00e9 \U0001f30a \\\" " + "x" * 100


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("shape", ['{"error":{"message":%s,"code":400}}', '{"detail": %s}', '{"message":%s}'])
def test_an_error_that_was_cut_says_how_it_began(shape: str, is_ascii: bool) -> None:
    """Engines quote what they refuse: a whole document, if need be."""
    whole = (shape % json.dumps(QUOTES, ensure_ascii=is_ascii)).encode()
    begins = whole.index(b"1 val")

    said = {read_error(whole[:end]).message for end in range(begins + 1, whole.index(b"xx") + 1)}

    assert all(QUOTES.startswith(message) for message in said - {SILENT})
    assert max(said - {SILENT}, key=len) == QUOTES[: QUOTES.index("xx")]
    assert len(said) > 20


@pytest.mark.parametrize(
    "end", [b"\\", b"\\q", b"\\u12", b"\\uzzzz", b"\\ud83c", b"\xf0\x9f", b"\n", b'"', b'"]']
)
def test_an_error_that_is_no_json_says_what_it_says_until_there(end: bytes) -> None:
    assert read_error(b' { "error" : {"message":"Too \\"long\\"' + end).message.rstrip() == 'Too "long"'


def test_an_error_with_half_a_character_can_be_passed_on() -> None:
    assert read_error(b'{"error":{"message":"not \\ud83c"}}').public_message == "not ?"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(lambda words: {"error": {"message": words}}, id="as-vllm"),
        pytest.param(lambda words: {"error": {"message": [words]}}, id="nested"),
        pytest.param(lambda words: {"error": {"type": words}}, id="typed"),
        pytest.param(lambda words: {"error": words}, id="bare"),
        pytest.param(lambda words: {"detail": words}, id="framework"),
        pytest.param(lambda words: {"detail": [{"input": words}]}, id="framework-quoting"),
        pytest.param(lambda words: {"object": "error", "message": words}, id="top-level"),
    ],
)
def test_of_a_message_only_the_beginning_is_searched_however_long_it_is(
    said: Callable[[str], object],
) -> None:
    error = error_of(said("EngineCore failed. " + "model " * 1_000_000))

    assert error is not None
    assert len(error.message) == MESSAGE_CHARS_MAX
    assert error.is_crash


def test_of_an_error_that_was_cut_no_more_is_read_than_is_shown() -> None:
    error = read_error(b'{"error":{"message":"' + b"x" * 1_000_000)

    assert set(error.message) == {"x"}
    assert len(error.message) < 50_000


@pytest.mark.parametrize(
    ("status", "message", "kind", "outcome"),
    [
        (400, "temperature must be positive", BackendRejected, Outcome.REJECTED),
        (413, "too large", BackendRejected, Outcome.REJECTED),
        (422, "unprocessable", BackendRejected, Outcome.REJECTED),
        (401, "Unauthorized", UpstreamFaulty, Outcome.MISCONFIGURED),
        (403, "key revoked", UpstreamFaulty, Outcome.MISCONFIGURED),
        (404, "The model `x` does not exist.", UpstreamFaulty, Outcome.MISCONFIGURED),
        (405, "Method Not Allowed", UpstreamFaulty, Outcome.MISCONFIGURED),
        (300, "", UpstreamFaulty, Outcome.MISCONFIGURED),
        (302, "", UpstreamFaulty, Outcome.MISCONFIGURED),
        (399, "", UpstreamFaulty, Outcome.MISCONFIGURED),
        (408, "too slow", UpstreamBusy, Outcome.BUSY),
        (429, "slow down", UpstreamBusy, Outcome.BUSY),
        (503, "The engine is currently busy", UpstreamBusy, Outcome.BUSY),
        (500, "cannot schedule new futures after shutdown", UpstreamBusy, Outcome.DRAINING),
        (500, "EngineCore encountered an issue.", UpstreamFailed, Outcome.FAILED),
        (500, "image input is not supported - hint: ...", BackendRejected, Outcome.REJECTED),
        (500, "audio input is not supported - hint: ...", BackendRejected, Outcome.REJECTED),
        (500, "Failed to parse tools: Missing tool function: {}", BackendRejected, Outcome.REJECTED),
        (500, "Failed to parse messages: Missing 'role' in message", BackendRejected, Outcome.REJECTED),
        (500, "Compute error: image input is not supported", UpstreamFaulty, Outcome.FAILED),
        (503, "image input is not supported - hint: ...", UpstreamBusy, Outcome.BUSY),
        (502, "bad gateway", UpstreamFaulty, Outcome.FAILED),
        (204, "", UpstreamFailed, Outcome.FAILED),
        (299, "", UpstreamFailed, Outcome.FAILED),
        (499, "'input': 'is the shop shutting down?'", BackendRejected, Outcome.REJECTED),
        (413, "", BodyRefused, Outcome.REJECTED),  # by a proxy: an engine says why
        (400, "", BackendRejected, Outcome.REJECTED),
    ],
)
def test_whose_fault_a_status_is(status: int, message: str, kind: type[Exception], outcome: Outcome) -> None:
    error = {"error": {"message": message}} if message else {}
    failure, seen = verdict(status, read_error(json.dumps(error).encode()))

    assert type(failure) is kind
    assert seen is outcome
    if isinstance(failure, UpstreamError):
        assert not message or message not in failure.message  # the engine's own words stay in the log


@pytest.mark.parametrize(
    ("status", "said_s", "told_s"), [(429, None, 1), (503, 30.0, 30), (408, 0.0, 1), (429, 3_600.0, 59)]
)
def test_when_a_backend_may_be_asked_again(status: int, said_s: float | None, told_s: int) -> None:
    failure, _ = verdict(status, read_error(b"{}"), said_s)
    assert failure.retry_after_s == told_s


def test_an_overlong_prompt_is_said_in_words_that_clients_recognise() -> None:
    body = (
        b'{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, your prompt '
        b'contains at least 4097 input tokens.","type":"BadRequestError","param":"input_tokens","code":400}}'
    )

    failure, _ = verdict(400, read_error(body))

    assert failure.status == 400
    assert failure.code == "context_length_exceeded"
    assert "his model's maximum context length is" in failure.message
    assert "Input tokens exceed the configured limit" in failure.message
    assert "context_length_exceeded" in failure.message


def test_so_is_one_that_is_too_long_for_llama_cpp() -> None:
    body = (
        b'{"error":{"code":400,"message":"request (4419 tokens) exceeds the available context size (4096 '
        b'tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":4419}}'
    )

    failure, outcome = verdict(400, read_error(body))

    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert "try increasing it. Input tokens exceed" in failure.message
    assert outcome is Outcome.REJECTED


def test_so_is_one_that_is_too_long_for_sglang() -> None:
    body = (
        b'{"object":"error","message":"The input (4513 tokens) is longer than the model\'s context length '
        b'(4096 tokens).","type":"BadRequestError","param":null,"code":400}'
    )

    failure, outcome = verdict(400, read_error(body))

    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert outcome is Outcome.REJECTED


def test_so_is_one_whose_code_says_so() -> None:
    failure, _ = verdict(400, read_error(b'{"error":{"message":"no","code":"context_length_exceeded"}}'))

    assert (failure.status, failure.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, 400),
        (413, 413),
        (422, 422),
        (429, 429),
        (503, 503),
        (401, None),
        (404, None),
        (500, None),
        ("400", None),
    ],
)
def test_which_status_is_believed_of_an_error_under_200(code: object, status: int | None) -> None:
    error = error_of({"error": {"message": "x", "code": code}})

    assert error is not None
    assert error.status == status


@pytest.mark.parametrize("param", ["max_tokens", "truncate_prompt_tokens"])
def test_a_complaint_about_a_limit_is_not_an_overflow(param: str) -> None:
    message = f"{param}=9 cannot be greater than max_model_len=4"
    body = json.dumps({"error": {"message": message, "param": param}}).encode()

    failure, _ = verdict(400, read_error(body))

    assert (failure.code, failure.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("see http://10.0.0.3:8000/x?y=z for more", "see [url] for more"),
        ("upstream 192.168.1.7:9001 said no", "upstream [address] said no"),
        ("cannot open /data/models/gemma-4/config.json", "cannot open [path]"),
        ("top_p must be in (0, 1], got 0.0. and/or n", "top_p must be in (0, 1], got 0.0. and/or n"),
    ],
)
def test_addresses_and_paths_of_the_operators_machines_stay_there(message: str, shown: str) -> None:
    failure, _ = verdict(400, read_error(json.dumps({"error": {"message": message}}).encode()))

    assert failure.message == shown


@pytest.mark.parametrize(("status", "shown"), [(400, 400), (413, 413), (422, 422), (402, 400), (418, 400)])
def test_only_a_verdict_on_the_content_keeps_its_status(status: int, shown: int) -> None:
    failure, _ = verdict(status, read_error(b'{"error":{"message":"x","code":"made_up_by_the_backend"}}'))

    assert (failure.status, failure.code) == (shown, "invalid_request")


@pytest.mark.parametrize(
    ("message", "gist"),
    [
        ("EngineCore encountered an issue.", "the engine died"),
        ("The server had an error while processing your request.", "the engine died"),
        ("The server had an error while processing your request. Sorry about that!", ""),
        ("cannot schedule new futures after shutdown", "it is stopping"),
        ("The model `gpt-5` does not exist.", "it does not know the model by this name"),
        ("1 validation error: 'input': 'my secret prompt'", ""),
    ],
)
def test_what_is_logged_of_an_error_is_in_our_words(message: str, gist: str) -> None:
    assert read_error(json.dumps({"error": {"message": message}}).encode()).gist == gist


@pytest.mark.parametrize("tokens", [0, TOKENS_MAX])
def test_the_least_and_the_most_that_is_counted(tokens: int) -> None:
    assert usage_of({"prompt_tokens": tokens, "completion_tokens": tokens}) == Usage(tokens, tokens)


@pytest.mark.parametrize("tokens", [-1, TOKENS_MAX + 1, 10**400, "3", None])
def test_a_count_that_is_none_is_nothing(tokens: object) -> None:
    found = usage_of({"prompt_tokens": TOKENS_MAX, "completion_tokens": tokens})

    assert found == Usage(prompt_tokens=TOKENS_MAX, completion_tokens=0)
