"""Estimating whole prompts: where the work is done, what bounds it, and what it learns."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from support.vocabulary import LANGUAGES

from gateway.core.class_counts import TextKind, class_count_tokens
from gateway.core.errors import AtCapacity, ConfigError
from gateway.core.estimation import margin_tokens
from gateway.core.facts import Learned
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, LongText, Prompt, Turn
from gateway.ports import Estimator
from gateway.tokenizer import PromptEstimator, Vocabulary, open_estimator
from gateway.tokenizer.estimator import (
    CONVERSATION_TEXTS,
    INLINE_BYTES,
    INLINE_CHARS,
    INLINE_TEXTS,
    REMEMBERED_CHARS_MIN,
    THREADS,
    WAITING_MAX,
    RememberedCounts,
    TextEstimate,
)
from gateway.tokenizer.exact import PIECE_CHARS, Counted, count_exact

COSTS = TemplateCosts()
WINDOW = 262_144
AROUND = 1 + 5 + 3 + 4  # what the template adds to one message
PROSE = "The river was wide, and nobody had crossed it since the spring. "


def chat(*texts: str) -> Prompt:
    return Prompt(turns=tuple(Turn("user", (text,)) for text in texts))


TURNS = st.builds(
    Turn,
    st.sampled_from(["user", "assistant", "system", "developer", "model", "tool", "critic"]),
    st.lists(
        st.sampled_from(["", " ", " Hello there. ", "<|channel>old<channel|>", PROSE * 40, PROSE * 90]),
        max_size=3,
    ).map(tuple),
    st.sampled_from([(), (), (), (("find", "{}"),)]),
    st.sampled_from([0, 0, 0, 1]),
)
PROMPTS = st.builds(
    Prompt,
    turns=st.lists(TURNS, max_size=9).map(tuple),
    tools_json=st.sampled_from(["", "", "", '[{"name":"find"}]']),
    thinking=st.sampled_from([False, False, True]),
)


class Encoding:
    """Stands in for tiktoken's: one token per 10 characters; notes sizes and threads, and can be held."""

    def __init__(
        self, hold: Callable[[], object] = lambda: None, failure: BaseException | None = None
    ) -> None:
        self.sizes: list[int] = []
        self.threads: list[int] = []
        self._hold, self._failure = hold, failure

    def encode(self, text: str, **_: object) -> list[int]:
        self.sizes.append(len(text))
        self.threads.append(threading.get_ident())
        self._hold()
        if self._failure is not None:
            raise self._failure
        return [0] * (len(text) // 10)


@pytest.fixture
def make(vocabulary: Vocabulary) -> Callable[[Encoding], PromptEstimator]:
    def estimator(encoding: Encoding) -> PromptEstimator:
        return PromptEstimator(dataclasses.replace(vocabulary, encoding=cast(tiktoken.Encoding, encoding)))

    return estimator


Make = Callable[[Encoding], PromptEstimator]

# ------------------------------------------------------------------ what comes out


async def test_an_exact_estimate_is_the_count_and_the_template(vocabulary: Vocabulary) -> None:
    estimator: Estimator = PromptEstimator(vocabulary)
    tokens = count_exact(vocabulary, PROSE.strip()).tokens + AROUND

    estimate = await estimator.estimate(chat(PROSE), COSTS, WINDOW)

    assert (estimate.tokens, estimate.tokens_max, estimate.mode) == (tokens, tokens + 17, CountMode.EXACT)


async def test_an_approximate_estimate_has_the_band_of_class_counts() -> None:
    tokens = class_count_tokens((PROSE * 300).strip()) + AROUND

    estimate = await PromptEstimator(None).estimate(chat(PROSE * 300), COSTS, WINDOW)

    assert estimate.tokens == pytest.approx(tokens, abs=1)
    assert estimate.tokens_max == estimate.tokens + margin_tokens(estimate.tokens, CountMode.APPROXIMATE)
    assert estimate.mode is CountMode.APPROXIMATE


async def test_ids_and_images_need_no_counting(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)

    ids = await estimator.estimate(Prompt(raw_tokens=5000), COSTS, WINDOW)
    image = await estimator.estimate(Prompt(turns=(Turn("user", (), images=1),)), COSTS, WINDOW)

    assert (ids.tokens, image.tokens) == (5000, AROUND + 282)
    assert encoding.sizes == []


@pytest.mark.parametrize("is_exact", [True, False], ids=["with-a-vocabulary", "approximate"])
async def test_ids_have_no_margin_and_teach_nothing(make: Make, is_exact: bool) -> None:
    estimator = make(Encoding()) if is_exact else PromptEstimator(None)
    before = estimator.learned()

    estimate = await estimator.estimate(Prompt(raw_tokens=WINDOW), COSTS, WINDOW)
    estimator.observe(estimate, WINDOW + 9_000)

    assert estimate == Estimate(WINDOW, WINDOW, CountMode.EXACT)
    assert estimator.learned() == before


async def test_of_several_completions_the_longest_is_the_prompt(make: Make) -> None:
    estimate = await make(Encoding()).estimate(
        Prompt(raw_texts=("x" * 100, "x" * 900, "x" * 10)), COSTS, WINDOW
    )

    assert estimate.tokens == 1 + 90


async def test_text_that_cannot_be_encoded_makes_the_estimate_approximate(make: Make) -> None:
    class PanicException(BaseException):
        pass

    estimate = await make(Encoding(failure=PanicException())).estimate(chat(PROSE * 20), COSTS, WINDOW)

    assert estimate.mode is CountMode.APPROXIMATE
    assert estimate.tokens == class_count_tokens((PROSE * 20).strip()) + AROUND


# ------------------------------------------------------------------ where it is counted


async def test_a_small_prompt_is_counted_on_the_spot(make: Make) -> None:
    encoding = Encoding()
    await make(encoding).estimate(chat("x" * INLINE_BYTES), COSTS, WINDOW)

    assert encoding.threads == [threading.get_ident()]


LARGE = [
    ("ascii", chat("x" * (INLINE_BYTES + 1))),
    ("other-scripts-take-more-bytes", chat("я" * (INLINE_BYTES // 4 + 1))),
    ("in-many-messages", chat(*["x" * 1000] * 17)),
    ("of-many-small-messages", chat(*["x" * 10] * INLINE_TEXTS)),
    ("a-completion", Prompt(raw_texts=("x" * (INLINE_BYTES + 1),))),
    ("tools", Prompt(turns=(Turn("user", ("hi",)),), tools_json="x" * INLINE_BYTES)),
    ("a-call", Prompt(turns=(Turn("assistant", (), tool_calls=(("f", "x" * INLINE_BYTES),)),))),
    ("a-role", Prompt(turns=(Turn("x" * (INLINE_BYTES + 1), ()),))),
]


@pytest.mark.parametrize("prompt", [row[1] for row in LARGE], ids=[row[0] for row in LARGE])
async def test_a_large_prompt_is_never_counted_on_the_event_loops_thread(prompt: Prompt, make: Make) -> None:
    encoding = Encoding()
    await make(encoding).estimate(prompt, COSTS, WINDOW)

    assert encoding.threads
    assert threading.get_ident() not in encoding.threads
    assert max(encoding.sizes) <= PIECE_CHARS


class Watched(str):
    """A text that notes which threads look through it."""

    threads: set[int]

    def count(self, *args: Any) -> int:
        self.threads.add(threading.get_ident())
        return super().count(*args)


@pytest.mark.parametrize(("size", "is_inline"), [(INLINE_CHARS // 2, True), (INLINE_CHARS, False)])
async def test_long_arguments_are_not_looked_through_by_the_event_loops_thread(
    size: int, is_inline: bool, make: Make
) -> None:
    arguments = Watched('"x"' * (size // 3 + 1))
    arguments.threads = set()
    prompt = Prompt(turns=(Turn("assistant", (), tool_calls=(("f", arguments),)),))
    estimator = make(Encoding())

    estimate = await estimator.estimate(prompt, COSTS, WINDOW)

    assert (arguments.threads == {threading.get_ident()}) is is_inline
    assert estimate == estimator.estimate_now(prompt, COSTS, WINDOW)


async def test_the_loop_goes_on_while_a_large_prompt_is_counted(make: Make) -> None:
    """The count waits for the loop's heart to beat: it could not end if the loop waited for the count."""
    beaten = threading.Event()

    def until_beaten() -> None:
        if not beaten.wait(timeout=20):
            raise KeyboardInterrupt("the event loop stood still")

    async def heart() -> None:
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        beaten.set()

    estimator = make(Encoding(hold=until_beaten))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heart)
        estimate = await estimator.estimate(chat("x" * 100_000), COSTS, WINDOW)

    assert estimate.tokens == pytest.approx(10_000 + AROUND, abs=4)


async def test_large_prompts_wait_for_two_threads_and_beyond_a_bound_are_shed(make: Make) -> None:
    release = threading.Event()
    encoding = Encoding(hold=lambda: release.wait(timeout=20))
    estimator = make(encoding)
    done: list[Estimate] = []

    async def one(number: int) -> None:
        done.append(await estimator.estimate(chat("x" * (INLINE_BYTES + 1 + number)), COSTS, WINDOW))

    async with anyio.create_task_group() as tasks:
        for number in range(WAITING_MAX):
            tasks.start_soon(one, number)
        await anyio.wait_all_tasks_blocked()

        with pytest.raises(AtCapacity) as shed:
            await estimator.estimate(chat("y" * (INLINE_BYTES + 1)), COSTS, WINDOW)
        release.set()
        small = await estimator.estimate(chat("hi"), COSTS, WINDOW)

    assert (shed.value.code, shed.value.retry_after_s) == ("estimator_busy", 1)
    assert small.tokens == AROUND
    assert len(done) == WAITING_MAX
    assert len(set(encoding.threads) - {threading.get_ident()}) == THREADS
    assert (await estimator.estimate(chat("y" * (INLINE_BYTES + 1)), COSTS, WINDOW)).tokens > 0


async def test_a_caller_that_leaves_while_waiting_gives_its_place_back(make: Make) -> None:
    release = threading.Event()
    estimator = make(Encoding(hold=lambda: release.wait(timeout=20)))
    prompt = chat("x" * (INLINE_BYTES + 1))

    async with anyio.create_task_group() as tasks:
        for _ in range(THREADS):
            tasks.start_soon(estimator.estimate, prompt, COSTS, WINDOW)
        await anyio.wait_all_tasks_blocked()
        for _ in range(WAITING_MAX):
            with anyio.CancelScope() as left:
                left.cancel()
                await estimator.estimate(prompt, COSTS, WINDOW)
        tasks.start_soon(estimator.estimate, prompt, COSTS, WINDOW)
        await anyio.wait_all_tasks_blocked()
        release.set()

    assert (await estimator.estimate(prompt, COSTS, WINDOW)).mode is CountMode.EXACT


# ------------------------------------------------------------------ long texts


def long_chat(text: str, *more: str, cut: int = 40_000) -> Prompt:
    """Return a chat of a long text that comes in pieces, and of others."""
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    long = LongText(len(text.encode()), hash(text), lambda: iter(pieces))
    return Prompt(turns=(Turn("user", (), long=long), *(Turn("user", (one,)) for one in more)))


@pytest.mark.parametrize(
    "text", [PROSE * 5_000, LANGUAGES * 100, "0" * 100_000], ids=["prose", "scripts", "figures"]
)
async def test_a_long_text_in_pieces_counts_what_it_counts_in_one(vocabulary: Vocabulary, text: str) -> None:
    whole = await PromptEstimator(vocabulary).estimate(chat(text, "x"), COSTS, WINDOW)
    in_pieces = await PromptEstimator(vocabulary).estimate(long_chat(text.strip(), "x"), COSTS, WINDOW)

    assert in_pieces.mode is CountMode.EXACT
    assert in_pieces.tokens == pytest.approx(whole.tokens, rel=0.0005)


@pytest.mark.parametrize(
    ("texts", "kind"),
    [((PROSE, "\u6cb3" * 500), TextKind.EAST_ASIAN), (("\u6cb3" * 9, PROSE * 9), TextKind.LATIN)],
)
async def test_without_a_vocabulary_the_longest_text_says_which_kind_it_is(
    texts: tuple[str, ...], kind: TextKind
) -> None:
    estimate = await PromptEstimator(None).estimate(chat(*texts), COSTS, WINDOW)

    assert isinstance(estimate, TextEstimate)
    assert estimate.kind is kind


async def test_without_a_vocabulary_a_long_text_is_judged_by_its_beginning() -> None:
    text = "Wide was the river. Река была широкой. " * 4_000
    whole = await PromptEstimator(None).estimate(chat(text), COSTS, WINDOW)
    in_pieces = await PromptEstimator(None).estimate(long_chat(text, "x"), COSTS, WINDOW)

    assert isinstance(in_pieces, TextEstimate)
    assert in_pieces.kind is TextKind.CYRILLIC
    assert in_pieces.tokens == pytest.approx(whole.tokens, rel=0.01)


async def test_what_is_remembered_needs_no_thread(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)
    history = ["a" * 20_000, "b" * 20_000]
    await estimator.estimate(long_chat("x" * 100_000, *history), COSTS, WINDOW)
    encoding.threads.clear()

    again = await estimator.estimate(long_chat("x" * 100_000, *history, "c" * 10_000), COSTS, WINDOW)
    assert encoding.threads == [threading.get_ident()]
    encoding.threads.clear()
    await estimator.estimate(long_chat("x" * 100_000, *history, "d" * 20_000), COSTS, WINDOW)

    assert again.tokens == pytest.approx(15_000 + 1 + 4 * 5 + 7, abs=4)
    assert threading.get_ident() not in encoding.threads


async def test_counting_a_long_text_ends_once_no_window_can_hold_it(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)

    estimate = await estimator.estimate(long_chat("x" * 400_000), COSTS, 10_000)

    assert estimate.mode is CountMode.BOUND
    assert sum(encoding.sizes) < 200_000
    assert len(estimator.remembered) == 0


async def test_a_long_text_that_no_window_can_hold_is_refused_unread(make: Make) -> None:
    encoding = Encoding()

    estimate = await make(encoding).estimate(long_chat("x" * 400_000), COSTS, 1_000)

    assert estimate.mode is CountMode.BOUND
    assert encoding.sizes == []


# ------------------------------------------------------------------ what bounds it


@pytest.mark.parametrize(
    "prompt",
    [chat("x" * 5000), chat(*["x" * 50] * 100), Prompt(raw_texts=("x" * 5000,))],
    ids=["one-message", "many-messages", "a-completion"],
)
async def test_what_no_window_can_hold_is_refused_unread(prompt: Prompt, make: Make) -> None:
    encoding = Encoding()
    estimate = await make(encoding).estimate(prompt, COSTS, 100)

    assert estimate.mode is CountMode.BOUND
    assert estimate.tokens == estimate.tokens_max > 100
    assert encoding.sizes == []


async def test_several_completions_are_not_added_up(make: Make) -> None:
    estimate = await make(Encoding()).estimate(Prompt(raw_texts=("x" * 900,) * 20), COSTS, 100)

    assert (estimate.mode, estimate.tokens) == (CountMode.EXACT, 91)


@pytest.mark.parametrize(
    "prompt",
    [chat("x" * 900_000), chat(*[str(number) * 200_000 for number in range(4)])],
    ids=["one-text", "four-texts"],
)
async def test_counting_ends_once_no_window_can_hold_the_prompt(prompt: Prompt, make: Make) -> None:
    encoding = Encoding()
    estimate = await make(encoding).estimate(prompt, COSTS, 30_000)

    assert estimate.mode is CountMode.BOUND
    assert 30_000 < estimate.tokens < 60_000
    assert len(encoding.sizes) == 2


async def test_approximate_counting_ends_too() -> None:
    estimate = await PromptEstimator(None).estimate(chat("0" * 300_000), COSTS, 20_000)

    assert estimate.mode is CountMode.BOUND
    assert 20_000 < estimate.tokens < 100_000


async def test_a_prompt_just_above_the_limit_is_still_counted(make: Make) -> None:
    estimate = await make(Encoding()).estimate(chat("x" * 1000), COSTS, 100)

    assert (estimate.tokens, estimate.mode) == (100 + AROUND, CountMode.EXACT)


# ------------------------------------------------------------------ what it remembers


async def test_earlier_turns_of_a_conversation_are_not_counted_again(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)
    document, question = "x" * REMEMBERED_CHARS_MIN, "y" * 100

    first = await estimator.estimate(chat(document), COSTS, WINDOW)
    second = await estimator.estimate(chat(document, question), COSTS, WINDOW)

    assert encoding.sizes == [REMEMBERED_CHARS_MIN, 100]
    assert second.tokens == first.tokens + 5 + 10


async def test_short_texts_are_not_worth_remembering(make: Make) -> None:
    estimator = make(Encoding())
    await estimator.estimate(chat("x" * (REMEMBERED_CHARS_MIN - 1)), COSTS, WINDOW)

    assert len(estimator.remembered) == 0


async def test_a_system_prompt_and_tools_are_however_short(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)
    system = Turn("system", ("x" * 30,))

    for size in (40, 50):
        prompt = Prompt(turns=(system, Turn("user", ("y" * size,))), tools_json="z" * 20)
        await estimator.estimate(prompt, COSTS, WINDOW)

    assert sorted(encoding.sizes) == [20, 30, 40, 50]


async def test_all_texts_of_a_conversation_are(make: Make) -> None:
    encoding = Encoding()
    estimator = make(encoding)
    turns = ["x" * size for size in range(10, 10 + CONVERSATION_TEXTS)]

    await estimator.estimate(chat(*turns[:-1]), COSTS, WINDOW)
    assert len(estimator.remembered) == 0
    await estimator.estimate(chat(*turns), COSTS, WINDOW)
    encoding.sizes.clear()
    again = await estimator.estimate(chat(*turns, "y" * 40), COSTS, WINDOW)

    assert encoding.sizes == [40]
    assert again == await make(Encoding()).estimate(chat(*turns, "y" * 40), COSTS, WINDOW)


async def test_a_count_that_stopped_early_is_not_remembered(make: Make) -> None:
    estimator = make(Encoding())
    prompt = chat("x" * 300_000)
    await estimator.estimate(prompt, COSTS, 10_000)

    assert len(estimator.remembered) == 0
    assert (await estimator.estimate(prompt, COSTS, WINDOW)).tokens > 29_000


async def test_closing_forgets_what_was_counted(make: Make) -> None:
    estimator = make(Encoding())
    await estimator.estimate(chat("x" * REMEMBERED_CHARS_MIN), COSTS, WINDOW)
    assert len(estimator.remembered) == 1

    estimator.close()

    assert len(estimator.remembered) == 0


def test_the_least_recently_used_counts_are_forgotten() -> None:
    remembered = RememberedCounts(entries_max=2)
    remembered.put(10, Counted(1))
    remembered.put(20, Counted(2))
    assert remembered.get(10) == Counted(1)
    remembered.put(30, Counted(3))

    assert remembered.get(20) is None
    assert remembered.get(10) == Counted(1)
    assert remembered.get(30) == Counted(3)


# ------------------------------------------------------------------ what it learns


async def test_answers_narrow_the_approximate_estimate_of_their_kind() -> None:
    estimator = PromptEstimator(None)
    prompt = chat(PROSE * 60)
    before = await estimator.estimate(prompt, COSTS, WINDOW)
    for _ in range(200):
        estimate = await estimator.estimate(prompt, COSTS, WINDOW)
        estimator.observe(estimate, round((before.tokens - AROUND) * 1.12) + AROUND)
    after = await estimator.estimate(prompt, COSTS, WINDOW)
    other = await estimator.estimate(chat("Река широка. " * 60), COSTS, WINDOW)

    assert after.tokens / before.tokens == pytest.approx(1.12, abs=0.02)
    assert other == await PromptEstimator(None).estimate(chat("Река широка. " * 60), COSTS, WINDOW)


async def test_answers_widen_the_exact_margin_but_never_move_the_count(make: Make) -> None:
    estimator = make(Encoding())
    prompt = chat("x" * 10_000)
    before = await estimator.estimate(prompt, COSTS, WINDOW)
    for _ in range(50):
        estimator.observe(before, before.tokens + 40)
    after = await estimator.estimate(prompt, COSTS, WINDOW)

    assert after.tokens == before.tokens
    assert after.tokens_max == after.tokens + 40
    assert before.tokens_max < after.tokens_max


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
async def test_answers_that_cannot_tell_teach_nothing(exact: bool, make: Make) -> None:
    estimator = make(Encoding()) if exact else PromptEstimator(None)
    plain = chat(PROSE * 60)
    first = await estimator.estimate(plain, COSTS, WINDOW)
    bound = await estimator.estimate(plain, COSTS, 10)

    for _ in range(50):
        estimator.observe(bound, 9000)
        estimator.observe(first, 0)
        estimator.observe(Estimate(100, 110, CountMode.EXACT), 9000)

    assert await estimator.estimate(plain, COSTS, WINDOW) == first


async def test_what_one_estimator_learned_another_uses_and_does_not_tell_on() -> None:
    taught, other = PromptEstimator(None), PromptEstimator(None)
    prompt = chat(PROSE * 60)
    before = await other.estimate(prompt, COSTS, WINDOW)
    for _ in range(200):
        taught.observe(before, round((before.tokens - AROUND) * 1.12) + AROUND)

    other.note_learned(taught.learned())

    assert await other.estimate(prompt, COSTS, WINDOW) == await taught.estimate(prompt, COSTS, WINDOW)
    assert other.learned() == Learned()
    other.note_learned(Learned())
    assert await other.estimate(prompt, COSTS, WINDOW) == before


async def test_the_margin_that_one_estimator_learned_another_keeps(make: Make) -> None:
    taught, other = make(Encoding()), make(Encoding())
    prompt = chat("x" * 10_000)
    estimate = await other.estimate(prompt, COSTS, WINDOW)
    taught.observe(estimate, estimate.tokens + 45)

    other.note_learned(taught.learned())

    after = await other.estimate(prompt, COSTS, WINDOW)
    assert (after.tokens, after.tokens_max) == (estimate.tokens, estimate.tokens + 45)


# ------------------------------------------------------------------ how it is opened


def test_no_vocabulary_means_approximate_and_a_file_means_exact(rank_file: Path) -> None:
    assert open_estimator(None).mode is CountMode.APPROXIMATE
    assert open_estimator(rank_file).mode is CountMode.EXACT


def test_a_missing_vocabulary_never_becomes_an_approximate_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_estimator(tmp_path / "gemma4.tiktoken")


@given(PROMPTS, st.sampled_from([12, 100, WINDOW]), st.booleans())
def test_a_short_chat_is_counted_in_the_same_way_on_its_short_path(
    vocabulary: Vocabulary, prompt: Prompt, limit_tokens: int, has_vocabulary: bool
) -> None:
    known = vocabulary if has_vocabulary else None
    quick, full = PromptEstimator(known), PromptEstimator(known)

    async def estimate() -> Estimate:
        return await quick.estimate(prompt, COSTS, limit_tokens)

    found, expected = anyio.run(estimate), full.estimate_now(prompt, COSTS, limit_tokens)
    if expected.mode is CountMode.BOUND:  # `estimate` may stop even earlier
        assert found.mode is CountMode.BOUND
    else:
        assert found == expected
        assert len(quick.remembered) == len(full.remembered)
