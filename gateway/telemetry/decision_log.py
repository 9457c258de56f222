"""Appends decisions to a file, one line per finished request, from a dedicated thread.

Several processes may append to one file: each batch is a single write under a lock on the file, and a
process that finds the file rotated opens its replacement. A killed process may leave an incomplete last
line; the next writer terminates it first.
"""

import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Lock, Thread

from gateway.core.errors import ConfigError
from gateway.core.policy import Policy
from gateway.core.profile import EngineFlags
from gateway.core.usage import RequestRecord
from gateway.events import about
from gateway.ports import Clock, Recorder
from gateway.telemetry import decision_lines

log = logging.getLogger("gateway.decisions")

QUEUE_MAX = 10_000
"""Maximum number of queued requests; further ones are dropped and counted. A choice that bounds memory:
seconds of full load."""

BATCH_MAX = 500
"""Maximum number of requests per write. A choice: the file is locked meanwhile."""

COLLECT_S = 0.1
"""How long the first request of a batch waits for more. A choice: waking the thread, locking and writing cost
80 us, which would dominate if each request was written separately."""

POLICIES_MAX = 16
"""Number of policies remembered for requests that were decided before the last reload. A choice: requests
outlast a few."""

WARNING_EVERY_S = 60.0
"""Minimum interval between two warnings of lost lines. A choice: a disk that is full stays so."""

END_S = 5.0
"""Seconds that an unresponsive disk may delay the end of the process. A choice: lines for a restart that is
not held up."""

_Line = tuple[str, bytes]
"""The version of a request's policy, and its line."""

OnLines = Callable[[str, int], None]
"""Receives numbers of requests that were `written`, `dropped` (queue full) or `failed` (write error)."""


class DecisionLog(Recorder):
    """`ports.Recorder` that writes to a file. Call `start` first and `close` at the end."""

    def __init__(
        self,
        file: Path,
        *,
        max_bytes: int,
        files: int,
        has_keys: bool,
        clock: Clock,
        on_lines: OnLines,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        """Append to `file`, and keep `files` files of about `max_bytes` each.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._files = _Files(file, max_bytes, files)
        self._has_keys = has_keys
        self._clock = clock
        self._on_lines = on_lines
        self._queue: Queue[_Line | None] = Queue(queue_max)
        self._is_ending = Event()
        self._thread = Thread(target=self._run, name="decisions", daemon=True)
        self._policies: OrderedDict[str, bytes] = OrderedDict()
        self._saying = Lock()
        self._unsaid = 0  # requests lost since the last warning
        self._said_at: float | None = None
        try:
            with self._files.locked():
                pass
        except OSError as error:
            raise ConfigError(f"decisions: {file} cannot be written: {error.strerror}") from error

    def policy_in_force(
        self, policy: Policy, engines: Mapping[str, EngineFlags], boxes: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Register a policy under which requests are decided from now on."""
        known = self._policies.copy()
        known[policy.version] = decision_lines.policy_line(policy, engines, boxes)
        known.move_to_end(policy.version)  # if it was in force before, as after a rollback
        while len(known) > POLICIES_MAX:
            known.popitem(last=False)
        self._policies = known  # replaced atomically: the thread reads it

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`. Only the line is queued: a record holds the state of a fleet."""
        version = record.asked.policy if record.asked is not None else ""
        try:
            self._queue.put_nowait((version, decision_lines.request_line(record, has_key=self._has_keys)))
        except Full:
            self._lost("dropped", 1, "too many wait to be written")

    def close(self) -> None:
        """Write everything queued, and stop. An unresponsive disk delays this by `END_S`."""
        self._is_ending.set()
        if self._thread.is_alive():
            with suppress(Full):
                self._queue.put(None, timeout=END_S)
                self._thread.join(END_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            batch = [self._queue.get()]
            if self._queue.qsize() < BATCH_MAX:
                self._is_ending.wait(COLLECT_S)
            with suppress(Empty):
                while len(batch) < BATCH_MAX:
                    batch.append(self._queue.get_nowait())
            is_over = None in batch
            lines = [line for line in batch if line is not None]
            if lines:
                self._write(lines)

    def _write(self, batch: list[_Line]) -> None:
        try:
            with self._files.locked() as written:
                parts: list[bytes] = []
                for version, line in batch:
                    if version not in written and (policy := self._policies.get(version)) is not None:
                        parts.append(policy)
                        written.add(version)
                    parts.append(line)
                self._files.append(b"".join(parts))
        except OSError as error:
            self._files.close()
            self._lost("failed", len(batch), error.strerror or str(error))
        except Exception:
            self._files.close()
            log.exception(
                "decisions: requests could not be written to %s",
                self._files.path,
                extra=about("decisions_failed"),
            )
            self._on_lines("failed", len(batch))
        else:
            self._on_lines("written", len(batch))

    def _lost(self, outcome: str, count: int, why: str) -> None:
        self._on_lines(outcome, count)
        with self._saying:
            self._unsaid += count
            now = self._clock.now()
            if self._said_at is not None and now - self._said_at < WARNING_EVERY_S:
                return
            lost, self._unsaid, self._said_at = self._unsaid, 0, now
        log.warning(
            "decisions: %d requests are missing from %s: %s",
            lost,
            self._files.path,
            why,
            extra=about("decisions_missing", requests=lost, reason=why),
        )


class _Files:
    """The current file and its rotated predecessors, of which FILE.1 is the newest."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._file: int | None = None
        self._written: set[str] = set()  # versions of the policies this process has written to it
        self._size = 0  # after this process's last write: if it is smaller now, it was truncated

    @contextmanager
    def locked(self) -> Iterator[set[str]]:
        """Lock the file and ensure that it has room. Yields the versions of the policies it contains.

        Raises:
            OSError: it cannot be opened or rotated.
        """
        file = self._current()
        try:
            yield self._written
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def append(self, data: bytes) -> None:
        """Append to the file in a single write."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            data = b"\n" + data  # a process was killed while writing
        while data:
            data = data[os.write(self._file, data) :]
        self._size = os.fstat(self._file).st_size

    def close(self) -> None:
        """Close the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a network disk that is full: it is closed all the same
                os.close(file)

    def _current(self) -> int:
        """Return the file at the path, locked."""
        while True:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
                self._written, self._size = set(), 0
            fcntl.flock(self._file, fcntl.LOCK_EX)
            own = os.fstat(self._file)
            if own.st_size < self._size:
                self._written = set()
            try:
                is_current = os.path.samestat(own, os.stat(self.path))
            except FileNotFoundError:
                is_current = False
            if is_current and own.st_size < self._max_bytes:
                return self._file
            if is_current:
                self._set_aside()
            self.close()

    def _set_aside(self) -> None:
        if self._files == 1:
            self.path.unlink()
            return
        for number in range(self._files - 1, 0, -1):
            older = self.path if number == 1 else self._numbered(number - 1)
            with suppress(FileNotFoundError):
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
