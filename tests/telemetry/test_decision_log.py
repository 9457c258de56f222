"""The log of decisions: appended to from a thread, bounded, shared by processes, and never waited for."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
from support.rankings import ranking_of
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.core.backends import Backend, Capacity, KneeStep, Pool
from gateway.core.decision import Candidate, Decision, Exclusion, Ranking
from gateway.core.errors import ConfigError
from gateway.core.health import Outcome
from gateway.core.load import Demand
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.profile import EngineFlags
from gateway.core.request import CountMode, Endpoint, Estimate
from gateway.core.request_features import RequestFeatures
from gateway.core.usage import AttemptRecord, Ending, RequestRecord, Usage
from gateway.replay import reading
from gateway.telemetry import decision_lines, decision_log
from gateway.telemetry.decision_lines import PolicyLine, RequestLine
from gateway.telemetry.decision_log import POLICIES_MAX, WARNING_EVERY_S, DecisionLog

BACKEND = Backend("light-0", "http://user:hidden@10.0.0.7", Capacity(100, (KneeStep(None, 64),)))
POLICY = Policy(
    models=(ModelPolicy("gemma-4", (TrafficClass("short_chat", ("light",)),)),),
    pools={"light": Pool("light", ("light-0",))},
    backends={"light-0": BACKEND},
    version="abc",
)
FLAGS = {"light-0": EngineFlags(64, 8192)}
ESTIMATE = Estimate(100, 116, CountMode.EXACT)
ASKED = RequestFeatures("abc", ESTIMATE, 0, None, {"x-team": "red"}, "gemma-4", Endpoint.CHAT, stream=True)
RECORD = RequestRecord(
    id="req-hidden",
    model="gemma-4",
    stream=True,
    ending=Ending.COMPLETED,
    status=200,
    error_code="",
    key="nightly",
    wall_at=1.0,
    received_at=10.0,
    estimated_at=10.001,
    admitted_at=10.201,
    first_byte_at=10.5,
    ended_at=12.5,
    decision=Decision(
        model="gemma-4",
        traffic_class="short_chat",
        class_reason="takes everything else",
        pools=("light",),
        estimate=ESTIMATE,
        demand=Demand(seqs=1, prompt_tokens=100, total_tokens=200),
        candidates=ranking_of(
            Candidate("light-0", "light"),
            Candidate("push", "push", excluded=Exclusion.AT_KNEE, detail="64 in flight"),
        ),
    ),
    backend="light-0",
    pool="light",
    attempts=(
        AttemptRecord("req-1", "light-0", "light", "short_chat", Outcome.OK, "hidden", 10.2, 10.5, 12.5),
    ),
    usage=Usage(prompt_tokens=110, completion_tokens=21, cached_tokens=16),
    chunks=11,
    asked=ASKED,
)


class Written:
    """A log, and what it said of its lines."""

    def __init__(self, file: Path, **options: Any) -> None:
        self.counted: Counter[str] = Counter()
        self.times = 0
        self._grown = Condition()
        self.log = DecisionLog(
            file,
            on_lines=self._count,
            **{"clock": SystemClock(), "max_bytes": 1_000_000, "files": 3, "has_keys": True, **options},
        )
        self.log.policy_in_force(POLICY, FLAGS, {"spark": ("a", "b")})

    def _count(self, outcome: str, count: int) -> None:
        with self._grown:
            self.counted[outcome] += count
            self.times += 1
            self._grown.notify_all()

    def wait(self, count: int) -> None:
        """Return once it has said something of so many lines."""
        with self._grown:
            assert self._grown.wait_for(lambda: self.counted.total() >= count, 20)

    def write(self, *records: RequestRecord) -> "Written":
        self.log.start()
        for record in records:
            self.log.finished(record)
        self.log.close()
        return self


def lines(file: Path) -> list[PolicyLine | RequestLine]:
    return [decision_lines.read(line) for line in file.read_bytes().splitlines()]


def test_a_line_holds_what_was_asked_and_what_became_of_it_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    Written(file).write(RECORD)

    assert json.loads(file.read_text().splitlines()[1]) == {
        "kind": "request",
        "v": 1,
        "at": 1.0,
        "ending": "completed",
        "total_s": 2.5,
        "status": 200,
        "key": "nightly",
        "policy": "abc",
        "model": "gemma-4",
        "prompt": {"tokens": 100, "tokens_max": 116, "mode": "exact"},
        "stream": True,
        "headers": {"x-team": "red"},
        "traffic_class": "short_chat",
        "out": {"push": "at_knee"},
        "pool": "light",
        "backend": "light-0",
        "tries": 1,
        "wait_s": 0.2,
        "ttft_s": 0.5,
        "tokens_in": 110,
        "tokens_out": 21,
        "tokens_cached": 16,
        "chunks": 11,
    }
    assert b"hidden" not in file.read_bytes()


def test_no_fleet_is_ranked_for_a_line_and_none_is_held_by_what_waits(tmp_path: Path) -> None:
    def rank() -> tuple[Candidate, ...]:
        raise AssertionError("the whole fleet was ranked")

    file = tmp_path / "d.jsonl"
    ranking = Ranking(Candidate("light-0", "light"), (("light-1", Exclusion.AT_KNEE),), rank)
    assert RECORD.decision is not None
    subject = Written(file)
    record = replace(RECORD, decision=replace(RECORD.decision, candidates=ranking))
    held = weakref.ref(rank)
    subject.log.finished(record)
    del record, ranking, rank

    assert held() is None
    subject.write()
    assert json.loads(file.read_text().splitlines()[1])["out"] == {"light-1": "at_knee"}


def test_a_line_is_read_as_what_it_was(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    counts = {"max_tokens": 5, "seqs": 4, "choices": 4, "prompts": 2, "images": 1, "audios": 2, "tools": 3}
    rest = {"reasoning": True, "is_job": True, "handed_over_as": "x", "size_bytes": 77, "patience_s": 2.5}
    headers = {"a": "b", "c": True}
    full = replace(ASKED, endpoint=Endpoint.COMPLETIONS, headers=headers, **counts, **rest)  # type: ignore[arg-type]
    Written(file).write(replace(RECORD, asked=full))

    [entry] = reading.read([file]).entries
    assert entry.asked == full
    policy = reading.read([file]).policies["abc"]
    assert policy.policy == replace(POLICY, backends={"light-0": replace(BACKEND, url="")})
    assert (policy.engines, policy.boxes) == (FLAGS, {"spark": ("a", "b")})


def test_a_request_that_was_never_decided_has_no_name_of_its_callers_choosing(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    lost = replace(RECORD, model="hidden", asked=None, decision=None, ending=Ending.REJECTED, backend="")
    Written(file).write(lost)

    [line] = lines(file)
    assert isinstance(line, RequestLine)
    assert (line.model, line.ending, line.prompt) == ("", Ending.REJECTED, None)
    assert b"hidden" not in file.read_bytes()


def test_names_of_keys_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    Written(file, has_keys=False).write(RECORD)

    assert b"nightly" not in file.read_bytes()


def test_files_are_set_aside_and_few_are_kept_each_with_its_policy(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    for _ in range(6):
        Written(file, max_bytes=100).write(RECORD)

    assert sorted(one.name for one in tmp_path.iterdir()) == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    for one in tmp_path.iterdir():
        assert [type(line) for line in lines(one)] == [PolicyLine, RequestLine]


def test_a_process_that_sets_its_file_aside_goes_on_with_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    subject = Written(file, max_bytes=100, files=9)
    subject.log.start()
    open_files = []
    for number in range(1, 4):
        subject.log.finished(RECORD)
        subject.wait(number)  # or they would be one batch
        open_files.append(len(os.listdir("/dev/fd")))
    subject.log.close()

    assert len(set(open_files)) == 1
    assert len(list(tmp_path.iterdir())) == 3
    for one in tmp_path.iterdir():
        assert [type(line) for line in lines(one)] == [PolicyLine, RequestLine]


def test_one_file_that_is_kept_is_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    for number in range(3):
        Written(file, max_bytes=100, files=1).write(replace(RECORD, wall_at=number))

    assert [one.name for one in tmp_path.iterdir()] == ["d.jsonl"]
    assert [line.at for line in lines(file) if isinstance(line, RequestLine)] == [2.0]


def test_two_processes_may_write_to_one_file_and_one_of_them_set_it_aside(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    one, other = Written(file), Written(file, max_bytes=100)
    other.write(replace(RECORD, wall_at=1))  # too small to stay, and so is what comes next
    one.write(replace(RECORD, wall_at=2))
    Written(file, max_bytes=100).write(replace(RECORD, wall_at=3))

    found = reading.read(list(tmp_path.iterdir()))
    assert [entry.past.at for entry in found.entries] == [1.0, 2.0, 3.0]
    assert found.broken == []


def test_two_processes_that_set_files_aside_at_once_lose_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "COLLECT_S", 0.0)
    both = [Written(tmp_path / "d.jsonl", max_bytes=100, files=200) for _ in range(2)]
    for subject in both:
        subject.log.start()
    for number in range(1, 41):
        for subject in both:
            subject.log.finished(RECORD)
        for subject in both:
            subject.wait(number)  # each line is a file
    for subject in both:
        subject.log.close()

    kinds = [type(line) for one in tmp_path.iterdir() for line in lines(one)]
    assert Counter(kinds) == {PolicyLine: 80, RequestLine: 80}


def test_who_holds_a_file_that_was_set_aside_goes_on_in_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    held = Written(file)  # open
    file.rename(tmp_path / "d.jsonl.1")

    held.write(RECORD)

    assert [type(line) for line in lines(file)] == [PolicyLine, RequestLine]
    assert (tmp_path / "d.jsonl.1").read_bytes() == b""


def test_a_file_that_is_emptied_under_way_gets_the_policy_again(tmp_path: Path) -> None:
    """As logrotate does with `copytruncate`."""
    file = tmp_path / "d.jsonl"
    subject = Written(file)
    subject.log.start()
    subject.log.finished(RECORD)
    subject.wait(1)
    os.truncate(file, 0)
    subject.log.finished(RECORD)
    subject.wait(2)
    subject.log.close()

    assert [type(line) for line in lines(file)] == [PolicyLine, RequestLine]


def test_the_policy_that_a_request_was_decided_under_comes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    subject = Written(file)
    subject.log.policy_in_force(replace(POLICY, version="def"), FLAGS, {})
    later = replace(RECORD, asked=replace(ASKED, policy="def"))
    subject.write(later, RECORD, later)

    found = [line.version if isinstance(line, PolicyLine) else line.policy for line in lines(file)]
    assert found == ["def", "def", "abc", "abc", "def"]


def test_a_policy_is_written_once_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    subject = Written(file)
    subject.log.start()
    for count in (1, 2):
        subject.log.finished(RECORD)
        subject.wait(count)  # so that each is written by itself
    subject.log.close()

    assert [type(line) for line in lines(file)] == [PolicyLine, RequestLine, RequestLine]


def test_of_the_policies_that_were_in_force_the_newest_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    subject = Written(file)
    for number in range(POLICIES_MAX):
        subject.log.policy_in_force(replace(POLICY, version=str(number)), FLAGS, {})
    oldest, newest = "0", str(POLICIES_MAX - 1)
    known = [replace(RECORD, asked=replace(ASKED, policy=version)) for version in (oldest, newest)]
    subject.write(RECORD, *known)

    found = [line.version if isinstance(line, PolicyLine) else line.policy for line in lines(file)]
    assert found == ["abc", oldest, oldest, newest, newest]


def test_a_policy_that_is_in_force_again_is_remembered_like_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    subject = Written(file)
    for number in range(POLICIES_MAX - 1):
        subject.log.policy_in_force(replace(POLICY, version=str(number)), FLAGS, {})
    for version in (POLICY.version, "newest"):
        subject.log.policy_in_force(replace(POLICY, version=version), FLAGS, {})
    subject.write(RECORD)

    assert [type(line) for line in lines(file)] == [PolicyLine, RequestLine]


def test_what_a_killed_process_left_unfinished_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    Written(file).write(replace(RECORD, wall_at=1), replace(RECORD, wall_at=2))
    file.write_bytes(file.read_bytes()[:-40])
    [torn] = reading.read([file]).broken
    assert (torn.line, torn.is_torn) == (3, True)

    Written(file).write(replace(RECORD, wall_at=3))

    found = reading.read([file])
    assert [(one.line, one.is_torn) for one in found.broken] == [(3, False)]
    assert [entry.past.at for entry in found.entries] == [1.0, 3.0]
    assert isinstance(decision_lines.read(file.read_bytes().splitlines()[3]), PolicyLine)


ENDLESS = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from telemetry.test_decision_log import RECORD, Written
subject = Written(Path(sys.argv[1]), max_bytes=2**30)
subject.log.start()
print("writes", flush=True)
while True:
    subject.log.finished(RECORD)
"""


def test_a_process_that_is_killed_leaves_at_most_one_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    tests = str(Path(__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(file), tests], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        while not file.exists() or file.stat().st_size < 300_000:
            assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()

    count = file.read_bytes().count(b"\n")
    found = reading.read([file])
    assert len(found.broken) <= 1
    assert all(one.is_torn for one in found.broken)
    assert len(found.entries) == count - 1  # the first line is the policy
    Written(file, max_bytes=2**30).write(RECORD)
    assert len(reading.read([file]).entries) == count


def test_what_ends_within_a_moment_is_written_in_one_piece_and_the_end_waits_for_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "COLLECT_S", 3600.0)
    subject = Written(tmp_path / "d.jsonl")
    subject.log.start()
    subject.log.finished(RECORD)
    while subject.log._queue.qsize():  # until the thread has it
        os.sched_yield()

    subject.log.finished(RECORD)
    subject.log.close()

    assert subject.counted == {"written": 2}
    assert subject.times == 1


def test_what_cannot_be_written_in_time_is_dropped_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Written(tmp_path / "d.jsonl", queue_max=2)
    with caplog.at_level(logging.WARNING, "gateway.decisions"):
        for _ in range(5):  # nobody writes yet
            subject.log.finished(RECORD)
    subject.write()

    assert subject.counted == {"dropped": 3, "written": 2}
    assert len(caplog.messages) == 1  # not one line per request
    assert "too many wait to be written" in caplog.text


def test_a_file_that_refuses_loses_lines_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    subject = Written(folder / "d.jsonl")
    (folder / "d.jsonl").unlink()
    folder.rmdir()

    with caplog.at_level(logging.WARNING, "gateway.decisions"):
        subject.write(RECORD)

    assert subject.counted == {"failed": 1}
    assert "No such file or directory" in caplog.text


def test_a_disk_that_refuses_only_when_the_file_is_closed_loses_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk says at `close` that it is full; the descriptor is gone all the same."""
    really_close, closed = os.close, list[int]()

    def fail(descriptor: int) -> None:
        really_close(descriptor)
        closed.append(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    subject = Written(tmp_path / "d.jsonl", max_bytes=1)  # so that it is set aside, and closed, at once
    subject.log.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        for _ in range(2):
            subject.log.finished(RECORD)
            subject.wait(subject.counted.total() + 1)
        assert len(closed) == 1
    subject.log.finished(RECORD)
    subject.log.close()

    assert subject.counted == {"written": 3}


def test_a_fault_in_writing_loses_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a fault")

    subject = Written(tmp_path / "d.jsonl")
    subject.log.start()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "gateway.decisions"):
        patch.setattr(os, "write", fail)
        subject.log.finished(RECORD)
        subject.wait(1)
    subject.log.finished(RECORD)
    subject.log.close()

    assert subject.counted == {"failed": 1, "written": 1}
    [said] = caplog.records
    assert said.exc_info is not None
    assert [type(line) for line in lines(tmp_path / "d.jsonl")] == [PolicyLine, RequestLine]


def test_the_end_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "BATCH_MAX", 1)
    monkeypatch.setattr(decision_log, "COLLECT_S", 0.0)
    file = tmp_path / "d.jsonl"
    subject = Written(file, queue_max=1)
    with file.open() as held, monkeypatch.context() as patch:
        patch.setattr(decision_log, "END_S", 0.0)
        fcntl.flock(held, fcntl.LOCK_EX)  # the thread waits for it
        subject.log.start()
        subject.log.finished(RECORD)
        while subject.log._queue.qsize():  # until the thread has it
            os.sched_yield()
        subject.log.finished(RECORD)
        subject.log.close()
        assert subject.counted == {}
    subject.wait(2)
    subject.log.close()

    assert subject.counted == {"written": 2}


def test_the_file_is_not_held_for_more_than_some_requests_which_do_not_wait_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "BATCH_MAX", 2)
    monkeypatch.setattr(decision_log, "COLLECT_S", 3600.0)
    subject = Written(tmp_path / "d.jsonl")
    for _ in range(5):
        subject.log.finished(RECORD)
    subject.log.start()
    subject.wait(4)
    subject.log.close()

    assert subject.counted == {"written": 5}
    assert subject.times == 3


def test_what_is_lost_is_said_once_in_a_while_with_all_that_was_lost_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StillClock()
    subject = Written(tmp_path / "d.jsonl", queue_max=1, clock=clock)
    said = []
    with caplog.at_level(logging.WARNING, "gateway.decisions"):
        for after_s in (0.0, 0.0, WARNING_EVERY_S - 1.0, 1.0, 1.0):  # nobody writes yet
            clock.time += after_s
            subject.log.finished(RECORD)
            said.append(len(caplog.records))

    assert said == [0, 1, 1, 2, 2]
    assert ["2 requests" in text for text in caplog.messages] == [False, True]


def test_it_writes_again_when_the_file_can_be_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    subject = Written(folder / "d.jsonl")
    (folder / "d.jsonl").unlink()
    folder.rmdir()
    subject.log.start()
    subject.log.finished(RECORD)
    subject.wait(1)
    folder.mkdir()
    subject.log.finished(RECORD)
    subject.log.close()

    assert subject.counted == {"failed": 1, "written": 1}
    assert [type(line) for line in lines(folder / "d.jsonl")] == [PolicyLine, RequestLine]


FULL_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from telemetry.test_decision_log import RECORD, Written
subject = Written(Path(sys.argv[1]), max_bytes=2**30)
subject.log.start()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
subject.log.finished(RECORD)
subject.wait(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
subject.log.finished(RECORD)
subject.log.close()
print(dict(subject.counted))
"""


def test_a_disk_that_was_full_leaves_a_torn_line_and_the_policy_comes_again(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    command = [sys.executable, "-c", FULL_FOR_A_WHILE, str(file), str(Path(__file__).parents[1])]

    said = subprocess.run(command, capture_output=True, text=True, check=True)

    assert said.stdout == "{'failed': 1, 'written': 1}\n"
    assert "1 requests are missing" in said.stderr
    found = reading.read([file])
    assert [one.line for one in found.broken] == [1]
    assert len(found.entries) == 1
    assert "abc" in found.policies


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/d\.jsonl cannot be written: No such file"):
        Written(tmp_path / "nowhere" / "d.jsonl")


def test_only_its_owner_and_group_can_read_it(tmp_path: Path) -> None:
    Written(tmp_path / "d.jsonl").write(RECORD)

    assert os.stat(tmp_path / "d.jsonl").st_mode & 0o007 == 0
