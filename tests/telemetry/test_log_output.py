"""Log lines go to real pipes, sockets and files: nobody waits for a reader, and what is lost is counted."""

import asyncio
import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO, TextIOBase
from pathlib import Path
from typing import TextIO, cast

import pytest
from support.loops import on_both_loops

from gateway.telemetry import logs
from gateway.telemetry.log_output import HELD_BYTES_MAX, LogOutput, outlet_of

anyio_backend = on_both_loops

LINE = "x" * 999 + "\n"


class Way:
    """A way to a reader that need not read."""

    def __init__(self, write: int, read: int) -> None:
        self.write_end, self._read_end = write, read
        self.is_gone = False
        os.set_blocking(read, False)
        self.stream = os.fdopen(write, "w")
        self.output = outlet_of(self.stream)

    def read(self) -> bytes:
        """Read what is there."""
        found = b""
        with suppress(BlockingIOError):
            while data := os.read(self._read_end, 65_536):
                found += data
        return found

    def read_all(self) -> bytes:
        """Read until nothing is held back any more."""
        found = self.read()
        while self.output.is_behind:
            self.output.write([])
            found += self.read()
        return found

    def stop_reading(self) -> None:
        """Be gone."""
        if not self.is_gone:
            self.is_gone = True
            os.close(self._read_end)


def pipe() -> Way:
    read, write = os.pipe()
    return Way(write, read)


def stream_socket() -> Way:
    write, read = socket.socketpair()
    return Way(write.detach(), read.detach())


def pipe_of_another_user() -> Way:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.telemetry.log_output._DESCRIPTORS", "/nowhere")
        return pipe()


@pytest.fixture(params=[pipe, pipe_of_another_user, stream_socket])
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    make: Callable[[], Way] = request.param
    made = make()
    yield made
    made.output.close()
    made.stream.close()
    made.stop_reading()


def numbered(count: int) -> list[str]:
    return [f"{number:06d} {LINE[7:]}" for number in range(count)]


def test_what_a_reader_leaves_is_held_back_and_comes_in_order_when_it_goes_on(way: Way) -> None:
    lines = numbered(900)
    for line in lines:
        way.output.write([line])
    assert way.output.is_behind
    assert way.read_all().decode() == "".join(lines)
    assert way.output.dropped == 0


def test_many_lines_at_once_and_ones_longer_than_a_pipe_come_whole(way: Way) -> None:
    lines = ["a\n", "b" * 200_000 + "\n", "c\n", "ü" * 5_000 + "\n"]
    way.output.write(lines)
    assert way.read_all().decode() == "".join(lines)


def test_beyond_its_limit_lines_are_dropped_and_counted(way: Way) -> None:
    lines = numbered(3_000)
    for line in lines:
        way.output.write([line])
    found = way.read_all().decode()
    assert way.output.dropped == len(lines) - found.count("\n") > 0
    assert "".join(lines).startswith(found)
    assert HELD_BYTES_MAX - len(LINE) < len(found) < HELD_BYTES_MAX + 1_000_000
    way.output.write(["and on\n"])
    assert way.read() == b"and on\n"


def test_what_other_processes_write_to_it_still_waits(way: Way) -> None:
    assert os.get_blocking(way.write_end)
    way.output.write(["a\n"])
    assert os.get_blocking(way.write_end)


def test_without_a_reader_lines_are_dropped(way: Way) -> None:
    for line in numbered(900):
        way.output.write([line])
    was_read = way.read().count(b"\n")
    way.stop_reading()
    way.output.write(["more\n"])
    assert not way.output.is_behind
    assert way.output.dropped >= 900 - was_read
    before = way.output.dropped
    way.output.write(["more\n"])
    assert way.output.dropped == before + 1


def test_for_a_new_reader_as_much_is_held_back_as_for_the_one_before(tmp_path: Path) -> None:
    fifo, lines = tmp_path / "log", numbered(HELD_BYTES_MAX // len(LINE))
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with fifo.open("w") as stream:
        output = outlet_of(stream)
        output.write(lines)
        os.close(first)
        output.write(["which finds that out\n"])
        before = output.dropped
        assert before > 0
        second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        output.write(lines)
        assert output.is_behind
        assert output.dropped == before
        os.close(second)
        output.close()


@pytest.mark.parametrize("make", [pipe, pipe_of_another_user])
def test_no_line_is_cut_where_others_write_into_the_same_pipe(make: Callable[[], Way]) -> None:
    way = make()
    os.write(way.write_end, b"another process's\n".rjust(select.PIPE_BUF))
    way.output.write(numbered(900))
    assert way.output.is_behind
    assert way.read().endswith(b"\n")
    way.stop_reading()
    way.output.close()
    way.stream.close()


def test_at_the_end_what_is_held_back_is_written_if_it_is_read(way: Way) -> None:
    lines = numbered(600)
    for line in lines:
        way.output.write([line])
    found: list[bytes] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            found.append(way.read())
        found.append(way.read())

    reader = threading.Thread(target=read)
    reader.start()
    way.output.close()
    ended.set()
    reader.join()
    assert b"".join(found).decode() == "".join(lines)


def test_the_end_does_not_wait_for_a_reader_for_long(way: Way) -> None:
    for line in numbered(900):
        way.output.write([line])
    way.output.close()
    found = way.read().count(b"\n")
    assert way.output.dropped in (900 - found, 900 - found - 1)  # a line may have been cut
    way.output.write(["more\n"])
    assert way.read() == b""


def test_a_file_is_written_to_as_usual(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        output = outlet_of(stream)
        output.write(["a\n", "b\n"])
        assert path.read_text() == "a\nb\n"
    output.write(["c\n"])  # it is closed
    assert (output.dropped, output.is_behind) == (1, False)


class Disk(TextIOBase):
    """A file on a disk with this much room, on which a line may end in the middle."""

    def __init__(self, room: int) -> None:
        self.room, self.text = room, ""

    def write(self, text: str) -> int:
        taken, self.room = text[: self.room], max(0, self.room - len(text))
        self.text += taken
        if len(taken) < len(text):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(text)

    def isatty(self) -> bool:
        return False


def test_a_line_cut_off_by_a_full_disk_is_not_continued_by_the_next() -> None:
    disk = Disk(room=6)
    output = outlet_of(cast("TextIO", disk))
    for line in ("one\n", "two\n", "three\n"):
        output.write([line])
    disk.room = 100
    for line in ("four\n", "five\n"):
        output.write([line])
    assert disk.text == "one\ntw\nfour\nfive\n"
    assert output.dropped == 2


@pytest.mark.parametrize("make", [StringIO, lambda: open(os.devnull, "w")])  # noqa: SIM115 - closed below
def test_any_stream_will_do(make: Callable[[], TextIO]) -> None:
    with make() as stream:
        output: LogOutput = outlet_of(stream)
        output.write(["a\n"])
        assert output.dropped == 0
        output.close()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Yield the root logger, and put back what it had."""
    found = logging.getLogger()
    handlers, level = found.handlers, found.level
    yield found
    found.handlers = handlers
    found.setLevel(level)


async def test_a_loop_goes_on_while_nobody_reads_and_says_afterwards_what_is_missing(
    way: Way, root: logging.Logger
) -> None:
    logs.set_up("info", way.stream)
    (handler,) = root.handlers
    assert isinstance(handler, logs._Lines)
    logs.gather_in(asyncio.get_running_loop())
    log = logging.getLogger("gateway.requests")
    for number in range(3_000):
        log.info("%s", number, extra={"fields": {"event": "request_queued", "text": LINE}})
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    dropped = logs.dropped_lines()
    assert dropped > 0
    assert not handler.catch_up()
    found = way.read()
    while not handler.catch_up():
        found += way.read()
    found += way.read()
    *_, last, told = found.decode().splitlines()
    assert f'"text": "{LINE[:-1]}' in last
    assert f'"event": "log_lines_dropped", "lines": {dropped}' in told
    assert found.count(b"\n") == 3_000 - dropped + 1
    assert handler.catch_up()
    assert way.read() == b""  # it is told once
    handler.close()


def test_what_a_full_disk_has_lost_is_told_once_there_is_room(root: logging.Logger) -> None:
    disk = Disk(room=0)
    logs.set_up("info", cast("TextIO", disk))
    (handler,) = root.handlers
    assert isinstance(handler, logs._Lines)
    for number in range(7):
        logging.getLogger("gateway.fleet").info("%s", number)
    for _ in range(30):  # the report is lost as well
        assert handler.catch_up()
    disk.room = 10_000
    for _ in range(2):
        assert handler.catch_up()
    (told,) = disk.text.strip().splitlines()
    assert '"event": "log_lines_dropped", "lines": 7' in told
