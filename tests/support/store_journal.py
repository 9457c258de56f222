"""What happened to jobs, as the store itself wrote it to its disk: every change, in order.

A server that keeps its data (`appendonly yes`) appends what each script has changed to a file before it
answers. So the file knows more than any reader: a job that ended twice, or an answer that two workers wrote.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Command = list[bytes]

FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
FOLLOWS = {
    "": {"queued"},
    "queued": {"in_progress", "cancelled", "failed"},
    "in_progress": {"queued", *FINAL},
}
"""What may become of a job: its status, and those it may have next."""


@dataclass
class JobHistory:
    """One job from its first change on.

    Attributes:
        statuses: Every one it had, in order.
        attempt: Its last claim's number.
        chunks: Chunks of its answer.
        faults: Changes that must not be.
    """

    statuses: list[str] = field(default_factory=list)
    attempt: int = 0
    chunks: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The last one, "" before the first."""
        return self.statuses[-1] if self.statuses else ""

    def change(self, fields: dict[bytes, bytes]) -> None:
        """Note what was written to the job."""
        attempt = int(fields.get(b"attempt", self.attempt))
        if (status := fields.get(b"status", b"").decode()) and status not in FOLLOWS.get(self.status, ()):
            self.faults.append(f"{status} after {self.status}")
        if status == "in_progress" and attempt != self.attempt + 1:
            self.faults.append(f"attempt {attempt} after {self.attempt}")
        if status:
            self.statuses.append(status)
        self.attempt = attempt

    def answer(self, entry: bytes, fields: dict[bytes, bytes]) -> None:
        """Note a chunk that was added to its answer."""
        attempt, self.chunks = int(fields[b"attempt"]), self.chunks + 1
        if self.status != "in_progress" or attempt != self.attempt:
            self.faults.append(f"attempt {attempt} writes while {self.status} by {self.attempt}")
        if entry != b"0-%d" % self.chunks:
            self.faults.append(f"chunk {entry.decode()} comes as number {self.chunks}")


def job_histories(folder: Path) -> dict[str, JobHistory]:
    """Return the history of every job that the server which keeps its data in `folder` ever had, by id."""
    histories: dict[str, JobHistory] = {}
    jobs, chunks = b"{gw:jobs}:job:", b"{gw:jobs}:chunks:"
    for name, *arguments in commands(folder):
        key = arguments[0] if arguments else b""
        if name.upper() == b"HSET" and key.startswith(jobs):
            history = histories.setdefault(key.removeprefix(jobs).decode(), JobHistory())
            history.change(_pairs(arguments[1:]))
        elif name.upper() == b"XADD" and key.startswith(chunks):
            history = histories.setdefault(key.removeprefix(chunks).decode(), JobHistory())
            history.answer(arguments[1], _pairs(arguments[2:]))
    return histories


def commands(folder: Path) -> Iterator[Command]:
    """Yield the commands that a server's append-only files hold, oldest first."""
    kept = folder / "appendonlydir"
    for line in (kept / "appendonly.aof.manifest").read_text().splitlines():
        _, name, _, _, _, kind = line.split()
        if kind == "i":  # the base is what was there before the first command: nothing
            yield from _parsed((kept / name).read_bytes())


def _parsed(data: bytes) -> Iterator[Command]:
    """Yield commands from the wire format that they are kept in."""
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        count, at = int(data[at + 1 : end]), end + 2
        words = []
        for _ in range(count):
            end = data.index(b"\r\n", at)
            length, at = int(data[at + 1 : end]), end + 2
            words.append(data[at : at + length])
            at += length + 2
        yield words


def _pairs(words: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(words[::2], words[1::2], strict=True))
