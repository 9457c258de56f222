"""Appends what was decided to a file, one line per request that ended, from a thread of its own.

Several processes may append to one file: each batch is written under a lock on the file, in one piece, and
whoever finds the file set aside opens the one that took its place. What a process that was killed has left
unfinished is one line without an end; whoever writes next ends it first.
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
from gateway.core.profile import EngineFlags
from gateway.core.usage import AttemptRecord, RequestRecord
from gateway.core.values import Policy
from gateway.events import about
from gateway.ports import Clock
from gateway.telemetry import decision_lines

log = logging.getLogger("gateway.decisions")

QUEUE_MAX = 10_000
"""Requests that may wait to be written; what ends beyond that is not written, and counted."""

BATCH_MAX = 500
"""Requests that are written in one piece."""

COLLECT_S = 0.1
"""How long the first of them waits for others: to wake the thread, take the lock and write costs 80 us, which
would be most of what a request costs if each was written by itself."""

POLICIES_MAX = 16
"""Policies that are remembered for requests which were decided before the last reload."""

WARNING_EVERY_S = 60.0
END_S = 5.0
"""Seconds that a disk which does not answer may hold up the end of the process."""

OnLines = Callable[[str, int], None]
"""Told how many requests were `written`, `dropped` (too many waited) or `failed` (the file refused them)."""


class DecisionLog:
    """`ports.Recorder` that writes to a file. `start` it, and `close` it in the end."""

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
        """Append to `file`, of which `files` are kept, each of about `max_bytes`.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._files = _Files(file, max_bytes, files)
        self._has_keys = has_keys
        self._clock = clock
        self._on_lines = on_lines
        self._queue: Queue[RequestRecord | None] = Queue(queue_max)
        self._is_ending = Event()
        self._thread = Thread(target=self._run, name="decisions", daemon=True)
        self._policies: OrderedDict[str, bytes] = OrderedDict()
        self._saying = Lock()
        self._unsaid = 0  # requests that were lost since the last warning
        self._said_at: float | None = None
        try:
            with self._files.locked():
                pass
        except OSError as error:
            raise ConfigError(f"decisions: {file} cannot be written: {error.strerror}") from error

    def policy_in_force(
        self, policy: Policy, engines: Mapping[str, EngineFlags], boxes: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Note a policy under which requests are decided from now on."""
        known = self._policies.copy()
        known[policy.version] = decision_lines.policy_line(policy, engines, boxes)
        while len(known) > POLICIES_MAX:
            known.popitem(last=False)
        self._policies = known  # in one step: the thread reads it

    def start(self) -> None:
        """Write what comes from now on."""
        self._thread.start()

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`. Attempts arrive with their request."""

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        try:
            self._queue.put_nowait(record)
        except Full:
            self._lost("dropped", 1, "too many wait to be written")

    def close(self) -> None:
        """Write what waits, and end. A disk that does not answer holds this up for `END_S`."""
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
            records = [record for record in batch if record is not None]
            if records:
                self._write(records)

    def _write(self, batch: list[RequestRecord]) -> None:
        try:
            with self._files.locked() as written:
                parts: list[bytes] = []
                for record in batch:
                    version = record.asked.policy if record.asked is not None else ""
                    if version and version not in written and version in self._policies:
                        parts.append(self._policies[version])
                        written.add(version)
                    parts.append(decision_lines.request_line(record, has_key=self._has_keys))
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
    """The file that is written to, and those that were set aside: FILE.1 is the newest of them."""

    def __init__(self, path: Path, max_bytes: int, files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        self._file: int | None = None
        self._written: set[str] = set()  # versions of the policies that this process wrote into it
        self._size = 0  # after what this process wrote last: if it is smaller, somebody has emptied it

    @contextmanager
    def locked(self) -> Iterator[set[str]]:
        """Have the file to oneself; it has room. Gives the versions of the policies that are in it.

        Raises:
            OSError: it cannot be opened, or set aside.
        """
        file = self._current()
        try:
            yield self._written
        finally:
            if self._file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)

    def append(self, data: bytes) -> None:
        """Write at the end of the file, in one piece."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            data = b"\n" + data  # somebody was killed while writing
        while data:
            data = data[os.write(self._file, data) :]
        self._size = os.fstat(self._file).st_size

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

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
