"""The truth check: what lasts counts, what comes and goes does not."""

from collections.abc import Sequence

import pytest

from gateway.core.backends import Backend, Capacity, KneeStep
from gateway.core.count_check import SAMPLES, Cause, CountDrift, CountTracker
from gateway.core.health import EngineSample
from gateway.core.kv import KvFormula
from gateway.core.load import Load
from gateway.profiles import library

KV = library.load("h100-tp1-light").capacity.kv
POOL = Capacity(32_768, (KneeStep(None, 64),), kv=KV, kv_blocks=1_000)
B = Backend("b", "http://b", POOL, batched_tokens=0)  # no chunks
OURS = 10


def watched(
    differences: Sequence[int], *, every_s: float = 1.0, tracker: CountTracker | None = None
) -> CountDrift:
    """Return the drift after samples whose engine has so many sequences more than are counted."""
    tracker = tracker or CountTracker()
    for number, difference in enumerate(differences):
        engine = EngineSample(at=100 + number * every_s, running=OURS + difference - 1, waiting=1)
        tracker.observe(engine, Load(seqs=OURS), B)
    return tracker.drift("b")


@pytest.mark.parametrize(
    ("differences", "lasting_seqs", "cause"),
    [
        ([0] * 61, 0, Cause.NONE),
        ([3] * 61, 3, Cause.OTHERS),
        ([3, 9, 4] * 21, 3, Cause.OTHERS),  # the part that was always there
        ([-2] * 61, -2, Cause.HELD),
        ([-2, -7] * 31, -2, Cause.HELD),
        ([-1, 1] * 31, 0, Cause.NONE),  # requests on their way in and out
        ([5] * 30 + [0] + [5] * 30, 0, Cause.NONE),
        ([5] * 54, 0, Cause.NONE),  # not for long enough yet
        ([0] * 61 + [4] * 61, 4, Cause.OTHERS),  # what is older than a minute is forgotten
        ([], 0, Cause.NONE),
    ],
)
def test_what_lasts_for_a_minute_counts(differences: list[int], lasting_seqs: int, cause: Cause) -> None:
    drift = watched(differences)

    assert (drift.lasting_seqs, drift.cause) == (lasting_seqs, cause)
    assert drift.seqs == (differences[-1] if differences else 0)


def test_a_few_samples_in_a_minute_say_nothing() -> None:
    assert watched([3] * 7, every_s=10.0).lasting_seqs == 0
    assert watched([3] * 13, every_s=5.1).lasting_seqs == 3


def test_what_was_counted_in_part_only_is_forgotten() -> None:
    tracker = CountTracker()
    assert watched([3] * 61, tracker=tracker).cause is Cause.OTHERS

    tracker.forget("b")

    assert tracker.drift("b") == CountDrift("b")
    assert "b" not in tracker.drifts()
    _, after = tracker.observe(EngineSample(at=161, running=13), Load(seqs=10), B)
    assert after == CountDrift("b", seqs=3)


@pytest.mark.parametrize(
    ("usages", "reserved", "excess"),
    [
        ([0.5] * SAMPLES, 400, 100),
        ([0.5] * SAMPLES, 500, 0),
        ([0.5] * SAMPLES, 700, 0),  # reserved in advance, not written yet
        ([0.9, 0.5, 0.9, 0.9, 0.9], 400, 100),  # the smallest of the last few
        ([0.5, 0.9, 0.9, 0.9, 0.9, 0.9], 400, 500),
        ([0.5] * (SAMPLES - 1), 400, 0),  # too few
    ],
)
def test_blocks_that_nobody_here_reserved(usages: list[float], reserved: int, excess: int) -> None:
    tracker = CountTracker()
    for number, usage in enumerate(usages):
        engine = EngineSample(at=float(number), running=1, kv_usage=usage)
        tracker.observe(engine, Load(seqs=1, kv_blocks=reserved), B)

    assert tracker.drift("b").kv_blocks == excess
    assert tracker.kv_taken == ({"b": excess} if excess else {})  # what admission plans without


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_blocks_that_others_have_left_are_there_again(is_forgotten: bool) -> None:
    tracker = CountTracker()
    for number in range(SAMPLES):
        tracker.observe(EngineSample(at=float(number), kv_usage=0.5), Load(), B)
    assert tracker.kv_taken == {"b": 500}

    if is_forgotten:
        tracker.forget("b")
    else:
        tracker.observe(EngineSample(at=9.0, kv_usage=0.0), Load(), B)

    assert tracker.kv_taken == {}


@pytest.mark.parametrize(
    ("excesses", "taken"),
    [
        ([3] * SAMPLES, 3),
        ([9, 9, 3, 9, 9], 3),  # the smallest of the last few
        ([0, 9, 9, 9, 9, 9], 9),
        ([9, 9, -1, 9, 9], 0),
        ([3] * (SAMPLES - 1), 0),  # too few
    ],
)
def test_sequences_that_nobody_here_runs(excesses: list[int], taken: int) -> None:
    tracker = CountTracker()
    for number, excess in enumerate(excesses):
        engine = EngineSample(at=float(number), running=10, waiting=excess)
        tracker.observe(engine, Load(seqs=10), B)

    assert tracker.drift("b").seqs_taken == taken
    assert tracker.seqs_taken == ({"b": taken} if taken else {})
    tracker.forget("b")
    assert tracker.seqs_taken == {}


@pytest.mark.parametrize(("kv", "kv_blocks"), [(None, 1_000), (KV, None)])
def test_where_blocks_are_not_counted_none_are_missing(kv: KvFormula | None, kv_blocks: int | None) -> None:
    tracker = CountTracker()
    capacity = Capacity(32_768, (KneeStep(None, 64),), kv=kv, kv_blocks=kv_blocks)
    for number in range(SAMPLES):
        tracker.observe(EngineSample(at=float(number), kv_usage=0.9), Load(), Backend("b", "", capacity))

    assert tracker.drift("b").kv_blocks == 0


def test_a_change_of_cause_can_be_told() -> None:
    tracker = CountTracker()
    causes = []
    for number in range(125):
        more = 2 if number < 65 else 0
        engine = EngineSample(at=float(number), running=more)
        before, after = tracker.observe(engine, Load(), B)
        if before.cause is not after.cause:
            causes.append(after.cause)

    assert causes == [Cause.OTHERS, Cause.NONE]


def test_a_chunk_that_is_being_read_is_its_own() -> None:
    """It sits in every sliding layer beside the window, for the length of a step."""
    assert KV is not None
    tracker = CountTracker()
    pool = Capacity(262_144, (KneeStep(None, 4),), kv=KV, kv_blocks=100_000)
    backend = Backend("b", "http://b", pool, batched_tokens=8_192)
    reserved = KV.blocks(20_000)
    usage = KV.boot_blocks(20_000, 8_192) / 100_000
    for number in range(SAMPLES):
        tracker.observe(
            EngineSample(at=float(number), running=1, kv_usage=usage),
            Load(seqs=1, kv_blocks=reserved),
            backend,
        )

    assert usage * 100_000 > reserved + 1_000
    assert tracker.drift("b").kv_blocks == 0

    # One that runs nothing of ours reads no chunk of ours.
    for number in range(SAMPLES):
        tracker.observe(EngineSample(at=float(number), running=1, kv_usage=usage), Load(), backend)

    assert tracker.drift("b").kv_blocks == int(usage * 100_000)


def test_an_operator_is_told_what_may_hold_slots() -> None:
    assert Cause.HELD.sentence().endswith("does not show: it hangs or sleeps, callers are slow, or a leak")
