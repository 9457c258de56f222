"""Estimates prompt lengths without blocking the event loop.

Small prompts are counted inline, large ones in one of two worker threads. Prompts that are rejected for
their size alone are rejected before any of their text is examined.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock

import anyio
import anyio.to_thread

from gateway.core.class_counts import TextKind, kind_of
from gateway.core.errors import AtCapacity
from gateway.core.estimation import Piece, Pieces, bound, margin_tokens, pieces, plain_texts
from gateway.core.facts import Learned
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, LongText, Prompt
from gateway.core.value import valueclass
from gateway.tokenizer.counting import chars_per_token_max, count
from gateway.tokenizer.exact import Counted, count_exact
from gateway.tokenizer.learning import LearnedMargin, LearnedRatios
from gateway.tokenizer.vocab import Vocabulary, load

INLINE_BYTES = 16_384
"""Up to this size, counting takes 1 ms, or 4 ms for hostile text (docs/estimate.md#time). A choice: what the
event loop may stand still for, against the cost of a thread."""
INLINE_TEXTS = 512
"""Maximum texts counted inline, with roles and names. A choice: 1 us each, or 3 us if its count is not
cached."""
THREADS = 2
"""Maximum threads that count. A choice: tiktoken computes without the GIL, so a second one is faster on two
cores; more would starve the event loop there."""
INLINE_CHARS = 1_000_000
"""Up to this size, applying the template takes 5 ms: it searches tools and arguments for texts. A choice,
like `INLINE_BYTES`."""
WAITING_MAX = 256
"""Maximum large prompts being counted or queued for it. A choice: at 60 ms per MB (docs/estimate.md#time) and
two threads, seconds of work."""
REMEMBERED_CHARS_MIN = 2048
"""Minimum characters of a text whose count is cached. A choice: a shorter one is counted in 0.1 ms, and would
displace longer ones."""
CONVERSATION_TEXTS = 8
"""A prompt with this many texts will return with a few more, so even short ones are cached. A choice: shorter
conversations are counted again in no time."""
ESCAPED_CHAR_BYTES = 12
"""Maximum bytes of a character in JSON: an emoji as two escapes."""
REMEMBERED_MAX = 32_768
"""Maximum number of texts whose counts are cached. A choice: 7 MB, the past turns of a thousand
conversations."""


TextKey = int
"""Cache key of a text: a hash of its length and its own hash."""


@valueclass(frozen=True, slots=True)
class TextEstimate(Estimate):
    """An estimate with the details that learning from the answer requires.

    Attributes:
        kind: The predominant kind of text; None if it was counted with a vocabulary.
        fixed_tokens: The part that did not need counting.
        counted_tokens: The rest, before any learned ratio.
    """

    kind: TextKind | None
    fixed_tokens: int
    counted_tokens: int


class RememberedCounts:
    """LRU cache of the token counts of texts. Thread-safe.

    The key is the length of the text and the hash that Python caches with it: 64 bits, keyed with a secret of
    this process, so that callers cannot construct a collision. A random one has a probability of 1 in 10^15.
    """

    def __init__(self, entries_max: int = REMEMBERED_MAX) -> None:
        self._counts: OrderedDict[TextKey, Counted] = OrderedDict()
        self._entries_max = entries_max
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: object) -> bool:
        return key in self._counts

    def get(self, key: TextKey) -> Counted | None:
        """Return the cached count, or None."""
        with self._lock:
            if key in self._counts:
                self._counts.move_to_end(key)
            return self._counts.get(key)

    def put(self, key: TextKey, counted: Counted) -> None:
        """Cache a count."""
        with self._lock:
            self._counts[key] = counted
            self._counts.move_to_end(key)
            if len(self._counts) > self._entries_max:
                self._counts.popitem(last=False)

    def clear(self) -> None:
        """Remove all counts."""
        with self._lock:
            self._counts.clear()


class PromptEstimator:
    """Implements `ports.Estimator`: exact with a vocabulary, approximate without one."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self.vocabulary = vocabulary
        self.remembered = RememberedCounts()
        self._margin = LearnedMargin()
        self._ratios = LearnedRatios()
        self._threads = anyio.CapacityLimiter(THREADS)
        self._waiting = 0
        self._limit = (0, 0)  # the latest limit, and the count at which counting stops for it

    @property
    def mode(self) -> CountMode:
        """How this estimator counts."""
        return CountMode.APPROXIMATE if self.vocabulary is None else CountMode.EXACT

    async def estimate(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate:
        """See ports.Estimator. Raises AtCapacity if too many large prompts are queued for counting."""
        plain = self._plain(prompt, costs, limit_tokens)
        if plain is not None:
            return plain
        size = _size(prompt)
        at_least_tokens = -(-size.chars // chars_per_token_max(self.vocabulary))
        if at_least_tokens > limit_tokens:
            return bound(at_least_tokens, limit_tokens)
        if size.texts <= INLINE_TEXTS and size.chars <= INLINE_CHARS:
            parts = pieces(prompt, costs)
            if size.bytes_max <= INLINE_BYTES:
                return self._estimate(parts, limit_tokens)
            known = self._known(parts)
            count = partial(self._estimate, parts, limit_tokens, known)
            if _bytes_to_count(parts, known) <= INLINE_BYTES:
                return count()
        else:
            count = partial(self.estimate_now, prompt, costs, limit_tokens)
        if self._waiting >= WAITING_MAX:
            raise AtCapacity(
                "Too many long prompts are waiting to be measured.", code="estimator_busy", retry_after_s=1
            )
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(count, limiter=self._threads)
        finally:
            self._waiting -= 1

    def estimate_now(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate:
        """Like `estimate`, but on the calling thread."""
        return self._estimate(pieces(prompt, costs), limit_tokens)

    def _plain(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate | None:
        """Return the estimate for a short chat of nothing but text; None if that needs the full procedure."""
        if self.vocabulary is None or len(prompt.turns) >= CONVERSATION_TEXTS:
            return None
        found = plain_texts(prompt, costs, INLINE_BYTES // 4)
        if found is None:
            return None
        fixed, texts = found
        total = fixed
        for text, comes_again in texts:
            if comes_again or len(text) >= REMEMBERED_CHARS_MIN:
                counted = self._count(Piece(text), _text_key(text), limit_tokens)
            else:
                counted = count_exact(self.vocabulary, text)
            if counted.guessed_tokens:
                return None
            total += counted.tokens
        if total > limit_tokens:
            return None
        tokens_max = total + margin_tokens(total, CountMode.EXACT, self._margin.tokens)
        return TextEstimate(total, tokens_max, CountMode.EXACT, None, fixed, total - fixed)

    def _known(self, parts: Pieces) -> Sequence[Counted | None]:
        """Return the cached counts of a prompt's texts, in order."""
        chars_min = _remembered_from(parts)
        keys = [_key(piece, chars_min) for piece in parts.texts]
        return [None if key is None else self.remembered.get(key) for key in keys]

    def _estimate(self, parts: Pieces, limit_tokens: int, known: Sequence[Counted | None] = ()) -> Estimate:
        """Count the pieces of a prompt. `known`: cached counts of its texts; () if not yet queried."""
        stop_above = self._stop_above(limit_tokens)
        total = parts.fixed_tokens
        counts, guessed = [], 0
        chars_min = _remembered_from(parts)
        for index, piece in enumerate(parts.texts):
            used = parts.fixed_tokens if parts.alternatives else total
            counted = known[index] if known else None
            if counted is None:
                counted = self._count(
                    piece, _key(piece, chars_min), (stop_above - used) * 100 // piece.percent
                )
            counts.append(counted.tokens)
            guessed += counted.guessed_tokens
            total = used + piece.weigh(counted.tokens)
            if total > stop_above:
                return bound(total, limit_tokens)
        if parts.alternatives:
            total = parts.total(counts)
        return self._judge(parts, total, exact=not guessed)

    def _stop_above(self, limit_tokens: int) -> int:
        """Return the count above which no window can hold a prompt, including the margin."""
        limit, stop_above = self._limit
        if limit != limit_tokens:
            stop_above = limit_tokens + margin_tokens(limit_tokens, self.mode)
            self._limit = limit_tokens, stop_above
        return stop_above

    def _judge(self, parts: Pieces, total: int, exact: bool) -> Estimate:
        if parts.alternatives and not parts.texts:  # token ids: an engine adds nothing to them
            return Estimate(total, total, CountMode.EXACT)
        counted = total - parts.fixed_tokens
        mode = self.mode if exact else CountMode.APPROXIMATE
        kind = None
        if self.vocabulary is None:
            kind = kind_of(_sample(parts))
            total = parts.fixed_tokens + round(counted * self._ratios.ratio(kind))
        margin = margin_tokens(total, mode, self._margin.tokens)
        return TextEstimate(total, total + margin, mode, kind, parts.fixed_tokens, counted)

    def _count(self, piece: Piece, key: TextKey | None, stop_above_tokens: int) -> Counted:
        """Return the tokens of a text, from the cache if possible."""
        if key is None:
            return count(self.vocabulary, piece.text, stop_above_tokens)
        counted = self.remembered.get(key)
        if counted is None:
            if piece.long is None:
                counted = count(self.vocabulary, piece.text, stop_above_tokens)
            else:
                counted = self._count_long(piece.long, stop_above_tokens)
            if counted.complete:
                self.remembered.put(key, counted)
        return counted

    def _count_long(self, text: LongText, stop_above_tokens: int) -> Counted:
        tokens = guessed = 0
        for one in text.pieces():
            counted = count(self.vocabulary, one, stop_above_tokens - tokens)
            tokens += counted.tokens
            guessed += counted.guessed_tokens
            if not counted.complete:
                return Counted(tokens, guessed, complete=False)
        return Counted(tokens, guessed)

    def observe(self, estimate: Estimate, actual_tokens: int) -> None:
        """See ports.Estimator. Learns only from prompts that this estimator has counted."""
        if not isinstance(estimate, TextEstimate) or actual_tokens <= 0:
            return
        if estimate.mode is CountMode.EXACT:
            self._margin.observe(actual_tokens - estimate.tokens)
        elif estimate.kind is not None:
            self._ratios.observe(
                estimate.kind, estimate.counted_tokens, actual_tokens - estimate.fixed_tokens
            )

    def learned(self) -> Learned:
        """See ports.SharedLearning."""
        return Learned(dict(self._ratios.seen), self._margin.p99_tokens)

    def note_learned(self, elsewhere: Learned) -> None:
        """See ports.SharedLearning."""
        self._ratios.elsewhere = elsewhere.ratios
        self._margin.elsewhere_tokens = elsewhere.p99_tokens

    def close(self) -> None:
        """Clear the cache. The threads belong to the event loop and end with it."""
        self.remembered.clear()


def open_estimator(vocab: Path | None) -> PromptEstimator:
    """Return an estimator with the vocabulary in a file, or an approximate one if None.

    There is no fallback: an unusable file raises ConfigError.
    """
    return PromptEstimator(None if vocab is None else load(vocab))


def _remembered_from(parts: Pieces) -> int:
    """Return the minimum length, in characters, of texts whose counts are cached."""
    return 1 if len(parts.texts) >= CONVERSATION_TEXTS and not parts.alternatives else REMEMBERED_CHARS_MIN


def _key(piece: Piece, chars_min: int) -> TextKey | None:
    """Return the cache key of a text; None if it is too short."""
    if piece.long is not None:
        return hash((piece.long.size_bytes, piece.long.key))
    if len(piece.text) < chars_min and not piece.comes_again:
        return None
    return _text_key(piece.text)


def _text_key(text: str) -> TextKey:
    return hash((len(text), text))


def _sample(parts: Pieces) -> str:
    """Return the longest text of a prompt, truncated."""
    text = max((piece.text for piece in parts.texts), key=len, default="")
    long = max(
        (piece.long for piece in parts.texts if piece.long is not None),
        key=lambda one: one.size_bytes,
        default=None,
    )
    return text if long is None or len(text) > long.size_bytes else next(long.pieces(), "")


@valueclass(frozen=True, slots=True)
class _Size:
    """The amount of text to count, as far as a quick look shows.

    Attributes:
        chars: Its characters, with those that the template drops; of a list of prompts, those of the longest.
        bytes_max: Maximum size of all texts in UTF-8.
        texts: Number of texts examined; above INLINE_TEXTS there are more.
    """

    chars: int
    bytes_max: int
    texts: int


def _bytes_to_count(parts: Pieces, known: Sequence[Counted | None]) -> int:
    """Return the maximum UTF-8 size of the texts whose counts are not cached."""
    return sum(
        piece.long.size_bytes if piece.long is not None else _bytes_max(piece.text)
        for piece, counted in zip(parts.texts, known, strict=True)
        if counted is None
    )


def _bytes_max(text: str) -> int:
    """Return the maximum UTF-8 size of a text."""
    return len(text) if text.isascii() else 4 * len(text)


def _size(prompt: Prompt) -> _Size:
    """Return the size of a prompt, examining no more than is needed to decide where to count it."""
    texts = [prompt.tools_json, *prompt.raw_texts[:INLINE_TEXTS]]
    longs: list[LongText] = []
    for turn in prompt.turns:
        texts.append(turn.role)
        texts += turn.texts
        if turn.long is not None:
            longs.append(turn.long)
        for call in turn.tool_calls:
            texts += call
        if len(texts) > INLINE_TEXTS:
            break
    together = sum(map(len, texts))
    bytes_max = 4 * together  # regardless of the characters
    for long in longs:
        together += long.size_bytes // ESCAPED_CHAR_BYTES
        bytes_max += long.size_bytes
    return _Size(together if prompt.turns else max(map(len, texts)), bytes_max, len(texts))
