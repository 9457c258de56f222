"""Batches: what is read of a file, what is wrong with one, how a batch goes on, and what it leaves."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from openai.types import Batch as SdkBatch
from support.batch_lines import read_lines

from gateway.core import batches
from gateway.core.batches import (
    CUSTOM_ID_MAX,
    ERRORS_MAX,
    Batch,
    BatchLine,
    BatchLineError,
    BatchSnapshot,
    BatchStatus,
    InputReader,
    LineSplitter,
    RawLine,
    answered_line,
    batch_object,
    unanswered_line,
)

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BATCH = Batch("batch_1", "team", CHAT, "file-1", created_at=1000)


def line(**members: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}, **members}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode() + b"\n"


def read(*lines: bytes, endpoint: str = CHAT) -> list[BatchLine | BatchLineError]:
    return list(read_lines(lines, endpoint))


# ------------------------------------------------------------------ the input file


def test_lines_are_read_with_their_numbers() -> None:
    found = read(line(), b"\n", line(custom_id="b", body={"model": "m", "messages": []}), b"  \r\n")
    assert found == [
        BatchLine(1, "a", b'{"model":"m"}'),
        BatchLine(3, "b", b'{"model":"m","messages":[]}'),
    ]


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_both_endpoints(endpoint: str) -> None:
    assert read(line(url=endpoint), endpoint=endpoint) == [BatchLine(1, "a", b'{"model":"m"}')]


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm() -> None:
    first = b"\xef\xbb\xbf" + line().replace(b"\n", b"\r\n")
    assert [type(one) for one in read(first, line(custom_id="b").rstrip())] == [BatchLine, BatchLine]


def test_a_body_keeps_what_it_says() -> None:
    body = {"text": "Grüße \U0001f600", "number": 12345678901234567890, "float": 0.1, "deep": [[{}]]}
    (found,) = read(line(body=body))
    assert isinstance(found, BatchLine)
    assert json.loads(found.body) == body


def test_a_body_is_as_long_as_it_was() -> None:
    written = '{"text":"Привет, 世界"}'.encode()
    (found,) = read(line(body=json.loads(written)))
    assert isinstance(found, BatchLine)
    assert found.body == written


def test_half_a_character_stays_an_escape() -> None:
    assert read(line(body={"text": "\ud83d"})) == [BatchLine(1, "a", b'{"text":"\\ud83d"}')]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        pytest.param(b"{", "invalid_json_line", None, id="no-json"),
        pytest.param(b"[]", "invalid_json_line", None, id="no-object"),
        pytest.param(b"\xff\xfe{}", "invalid_json_line", None, id="no-utf-8"),
        pytest.param("{}".encode("utf-16"), "invalid_json_line", None, id="utf-16"),
        pytest.param(b"[" * 200_000, "invalid_json_line", None, id="deep"),
        pytest.param(line(body={"x": [0] * 200_000}), "too_many_items", None, id="values"),
        pytest.param(b'{"custom_id": NaN}', "invalid_json_line", None, id="not-a-number"),
        pytest.param(b'{"custom_id": ' + b"9" * 5000 + b"}", "invalid_json_line", None, id="long-number"),
        pytest.param(
            line(body={"x": 0}).replace(b"0", b"1e999"), "invalid_json_line", None, id="infinite-number"
        ),
        pytest.param(line(custom_id=...), "invalid_custom_id", "custom_id", id="no-custom-id"),
        pytest.param(line(custom_id=7), "invalid_custom_id", "custom_id", id="a-number"),
        pytest.param(line(custom_id=""), "invalid_custom_id", "custom_id", id="empty"),
        pytest.param(line(custom_id="\ud800"), "invalid_custom_id", "custom_id", id="surrogate"),
        pytest.param(line(custom_id="a\ud800"), "invalid_custom_id", "custom_id", id="surrogate-at-the-end"),
        pytest.param(line(custom_id="x" * (CUSTOM_ID_MAX + 1)), "invalid_custom_id", "custom_id", id="long"),
        pytest.param(line(method="GET"), "invalid_method", "method", id="method"),
        pytest.param(line(method=...), "invalid_method", "method", id="no-method"),
        pytest.param(line(url="/v1/embeddings"), "invalid_url", "url", id="unknown-url"),
        pytest.param(line(url=["/v1/responses"]), "invalid_url", "url", id="url-of-another-kind"),
        pytest.param(line(url=RESPONSES), "mismatched_endpoint", "url", id="the-other-url"),
        pytest.param(line(body="{}"), "invalid_body", "body", id="body-as-text"),
        pytest.param(line(body=...), "invalid_body", "body", id="no-body"),
        pytest.param(line(body={"stream": True}), "invalid_body", "body.stream", id="stream"),
    ],
)
def test_what_is_wrong_with_a_line(raw: bytes, code: str, param: str | None) -> None:
    error, good = read(raw, line(custom_id="good"))
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line, error.param) == (code, 1, param)
    assert error.message.endswith(".")
    assert isinstance(good, BatchLine)


def test_a_custom_id_may_be_as_long_as_is_said() -> None:
    (found,) = read(line(custom_id="x" * CUSTOM_ID_MAX))
    assert isinstance(found, BatchLine)


def test_a_byte_order_mark_belongs_to_the_beginning_of_a_file() -> None:
    _, error = read(line(), b"\xef\xbb\xbf" + line(custom_id="b"))
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == ("invalid_json_line", 2)


def test_a_custom_id_is_there_once() -> None:
    first, error, other = read(line(), line(), line(custom_id="b"))
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == ("duplicate_custom_id", 2)
    assert error.message == "Line 1 has the same custom_id."
    assert isinstance(first, BatchLine) and isinstance(other, BatchLine)


@pytest.mark.parametrize("lines", [(), (b"\n", b"  \n")])
def test_an_empty_file(lines: tuple[bytes, ...]) -> None:
    (error,) = read(*lines)
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == ("empty_file", None)


def test_requests_up_to_the_limit_and_not_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches.LINES_MAX == 50_000
    monkeypatch.setattr(batches, "LINES_MAX", 500)
    lines = [line(custom_id=str(number)) for number in range(501)]
    assert {type(one) for one in read(*lines[:-1], b"\n")} == {BatchLine}
    *good, error = read(*lines, b"never read")
    assert len(good) == 500
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == ("too_many_requests", None)


def test_bytes_up_to_the_limit_and_not_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches.FILE_BYTES_MAX == 209_715_200
    monkeypatch.setattr(batches, "FILE_BYTES_MAX", 2 * len(line()))
    assert [type(one) for one in read(line(), line(custom_id="b"))] == [BatchLine, BatchLine]
    *_, error = read(line(), line(custom_id="b"), b"\n")
    assert isinstance(error, BatchLineError)
    assert (error.code, error.line) == ("file_too_large", None)


def test_after_many_errors_no_more_is_read() -> None:
    taken = 0

    def lines() -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield b"{"

    assert len(list(read_lines(lines(), CHAT))) == taken == ERRORS_MAX


def test_an_error_of_the_file_as_a_whole_is_counted_too() -> None:
    reader = InputReader(CHAT)
    assert reader.end() is not None
    assert (len(reader.errors), reader.is_over) == (1, True)


# ------------------------------------------------------------------ the batch


def test_the_final_ones() -> None:
    final = {status for status in BatchStatus if status.is_final}
    assert final == {"failed", "completed", "expired", "cancelled"}


def test_a_batch_is_given_up_when_its_time_is_over_or_its_caller_says_so() -> None:
    running = BatchSnapshot(BatchStatus.IN_PROGRESS, False, 60.0, 0, ())
    assert running.is_given_up is False
    assert replace(running, is_due=True).is_given_up
    assert replace(running, status=BatchStatus.CANCELLING).is_given_up


def test_the_object_is_the_sdk_s() -> None:
    reached = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
    times = {status: at for at, status in enumerate(reached, start=1001)}
    shown = batch_object(replace(BATCH, status=BatchStatus.COMPLETED, times=times))
    assert shown == {
        "id": "batch_1",
        "object": "batch",
        "endpoint": CHAT,
        "errors": None,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": "completed",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1000,
        "in_progress_at": 1001,
        "expires_at": 1000 + 86_400,
        "finalizing_at": 1002,
        "completed_at": 1003,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": None,
    }
    read_by_sdk = SdkBatch.model_validate(shown, strict=True)
    assert set(shown) <= set(SdkBatch.model_fields)
    assert read_by_sdk.completed_at == 1003


def test_what_is_wrong_with_the_file_is_in_it() -> None:
    (error,) = read(b"{")
    assert isinstance(error, BatchLineError)
    failed = replace(BATCH, status=BatchStatus.FAILED, times={BatchStatus.FAILED: 2}, errors=(error,))
    shown = SdkBatch.model_validate(batch_object(failed), strict=True)
    assert shown.errors is not None and shown.errors.data is not None
    assert (shown.errors.data[0].code, shown.errors.data[0].line) == ("invalid_json_line", 1)


def test_a_line_s_id_is_its_own_and_always_the_same() -> None:
    ids = {BATCH.line_id(number) for number in range(1, 1001)}
    assert len(ids) == 1000
    assert BATCH.line_id(1) == BATCH.line_id(1) != Batch("batch_2", None, CHAT, "f", 1).line_id(1)
    assert BATCH.line_id(1).startswith("batch_req_")


# ------------------------------------------------------------------ what it leaves


def test_the_line_of_an_answer() -> None:
    written = answered_line("batch_req_1", "ä", 200, "req_1", b'{"id": "chatcmpl-1"}')
    assert written.count(b"\n") == 1 and written.endswith(b"\n")
    assert json.loads(written) == {
        "id": "batch_req_1",
        "custom_id": "ä",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"id": "chatcmpl-1"}},
        "error": None,
    }


@pytest.mark.parametrize("name", ["a", '"body":null', "\u2028"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"a": "b", "c": [1.5, None, True]}, id="ascii"),
        pytest.param({"ä": "é\u2028\U0001f600x日本\u0000\n"}, id="escaped"),
        pytest.param({"a": ['\\é\t"é\x7f' + 9_000 * "é日", "\u2028" + 9_000 * "x"]}, id="long"),
        pytest.param({}, id="empty"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_the_line_of_an_answer_holds_its_body(name: str, body: dict[str, Any], indent: int | None) -> None:
    encoded = json.dumps(body, ensure_ascii=False, indent=indent).encode()
    written = answered_line(name, name, 200, name, encoded)
    assert written.isascii()
    assert len(written.splitlines()) == 1
    assert json.loads(written)["response"]["body"] == body
    assert json.loads(written)["custom_id"] == name


def test_a_text_of_another_script_is_escaped_in_few_steps() -> None:
    body = json.dumps({"content": 2_000 * "Привет, мир! "}, ensure_ascii=False).encode()
    steps = 0

    def step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(step)
    try:
        answered_line("a", "a", 200, "a", body)
    finally:
        sys.setprofile(None)
    assert steps < 1_000


def test_the_line_of_a_failure() -> None:
    written = unanswered_line("batch_req_1", "a", "batch_expired", "The batch's time was over.")
    assert json.loads(written) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": "The batch's time was over."},
    }


# ------------------------------------------------------------------ files that come in pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_however_a_file_is_cut(size: int) -> None:
    content = b"one\n\ntwo\r\nthree \xe2\x80\xa8 still three\nlast"
    splitter = LineSplitter()
    lines = [line for at in range(0, len(content), size) for line in splitter.feed(content[at : at + size])]
    lines += splitter.end()

    assert [line.data for line in lines] == [one for one in content.splitlines(keepends=True) if one.strip()]
    assert [line.number for line in lines] == [1, 3, 4, 5]
    assert [content[line.end :] for line in lines[:2]] == [content[4:], content[10:]]
    assert lines[-1].end == len(content)
    for line in lines:  # whoever goes on behind a line finds the next ones
        again = LineSplitter(line.number, line.end)
        assert [*again.feed(content[line.end :]), *again.end()] == lines[lines.index(line) + 1 :]


def test_a_million_empty_lines_are_one_step() -> None:
    splitter = LineSplitter()
    empty = b"\n \r\n" * 500_000
    lines = [line for piece in (b"one\n", empty, empty + b"  two\n") for line in splitter.feed(piece)]
    assert lines == [RawLine(1, b"one\n", 4), RawLine(2_000_002, b"  two\n", 4 + 2 * len(empty) + 6)]


def test_a_line_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LINE_BYTES_MAX", 1000)
    splitter, reader = LineSplitter(), InputReader(CHAT)
    lines = [*splitter.feed(b"x" * 700), *splitter.feed(b"x" * 700 + b"\n" + line()), *splitter.end()]
    assert [one.data for one in lines] == [None, line()]
    found = [reader.read(one) for one in lines]
    assert found[0] == BatchLineError("line_too_long", "The line has more than 1,000 bytes.", 1)
    assert found[1] == BatchLine(2, "a", b'{"model":"m"}')


def test_a_line_that_is_too_long_counts_towards_the_limit_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FILE_BYTES_MAX", batches.LINE_BYTES_MAX + len(line()))
    reader = InputReader(CHAT)
    found = [reader.read(RawLine(number, data, 0)) for number, data in enumerate((None, line(), b"\n"), 1)]
    assert [type(one) for one in found] == [BatchLineError, BatchLine, BatchLineError]
    assert [error.code for error in reader.errors] == ["line_too_long", "file_too_large"]


@pytest.mark.parametrize("size", [1, 600, 999])
def test_a_line_of_the_longest_length_is_kept(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(batches, "LINE_BYTES_MAX", 1000)
    whole, splitter = b"x" * 999 + b"\n", LineSplitter()
    lines = [line for piece in (whole[:size], whole[size:]) for line in splitter.feed(piece)]
    assert lines == [RawLine(1, whole, 1000)]


def test_names_of_a_line_and_of_files_come_of_the_batch() -> None:
    other = replace(BATCH, id="batch_2")
    tokens = {batch.line_token(number) for batch in (BATCH, other) for number in (1, 2)}
    files = {batch.file_id(kind) for batch in (BATCH, other) for kind in ("output", "error")}
    assert (len(tokens), len(files)) == (4, 4)
    assert BATCH.line_id(1) == f"batch_req_{BATCH.line_token(1)}"
