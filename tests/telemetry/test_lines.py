"""Lines of one round of the event loop are written together, in order, and none is lost."""

import asyncio
import io
import logging
import threading

import anyio.to_thread
import pytest

from gateway.telemetry import logs


class Stream(io.StringIO):
    """Keeps what it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def log(stream: Stream) -> logging.Logger:
    found = logging.Logger("lines", logging.INFO)
    found.addHandler(logs._Lines(stream))
    return found


def gather(log: logging.Logger) -> None:
    (handler,) = log.handlers
    assert isinstance(handler, logs._Lines)
    handler.gather_in(asyncio.get_running_loop())


async def test_lines_of_one_round_are_one_write(log: logging.Logger, stream: Stream) -> None:
    gather(log)
    log.info("a")
    log.info("b")
    assert stream.writes == []
    await asyncio.sleep(0)
    assert stream.writes == ["a\nb\n"]
    log.info("c")
    await asyncio.sleep(0)
    assert stream.writes == ["a\nb\n", "c\n"]


async def test_a_warning_is_written_at_once_behind_what_came_before(
    log: logging.Logger, stream: Stream
) -> None:
    gather(log)
    log.info("a")
    log.warning("b")
    assert stream.getvalue() == "a\nb\n"
    await asyncio.sleep(0)
    assert stream.getvalue() == "a\nb\n"


async def test_what_another_thread_says_is_written_at_once(log: logging.Logger, stream: Stream) -> None:
    gather(log)
    log.info("a")
    await anyio.to_thread.run_sync(log.info, "b")
    assert stream.getvalue() == "a\nb\n"


async def test_at_the_end_what_was_gathered_is_written(log: logging.Logger, stream: Stream) -> None:
    gather(log)
    log.info("a")
    log.handlers[0].flush()
    assert stream.getvalue() == "a\n"


def test_after_the_loop_lines_are_written_at_once(log: logging.Logger, stream: Stream) -> None:
    async def run() -> None:
        gather(log)
        log.info("a")

    asyncio.run(run())
    log.info("b")
    assert stream.getvalue() == "a\nb\n"
    thread = threading.Thread(target=log.info, args=("c",))
    thread.start()
    thread.join()
    assert stream.getvalue() == "a\nb\nc\n"


async def test_a_line_that_cannot_be_made_harms_no_other(
    log: logging.Logger, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    gather(log)
    log.info("a")
    log.info("%d", "x")
    log.info("c")
    await asyncio.sleep(0)
    assert stream.getvalue() == "a\nc\n"
    assert "Logging error" in capsys.readouterr().err
