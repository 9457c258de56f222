"""The requests that a condition admits, as intervals, to find classes that can never match. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from gateway.core.policy import COUNTED, Bound, When, range_of
from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class Interval:
    """Integers from `low` to `high` inclusive; None: no upper end."""

    low: int = 0
    high: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it contains no number."""
        return self.high is not None and self.high < self.low

    def within(self, other: "Interval") -> bool:
        """Return whether this interval is contained in the other."""
        if self.is_empty:
            return True
        return self.low >= other.low and (
            other.high is None or (self.high is not None and self.high <= other.high)
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """The requests that a condition admits.

    Attributes:
        counts: Intervals, by the fields of `When`. Totals are computed with this class's own reserve.
        output_reserve_tokens: Output tokens assumed in a total for requests without `max_tokens`.
        headers: Accepted values; an empty set means any value.
        max_tokens_given: Whether `max_tokens` must be present, as for any condition on it.
        upper_parts: The counts of which it admits all from some number above 0 on.
    """

    counts: Mapping[str, Interval]
    output_reserve_tokens: int
    reasoning: bool | None
    stream: bool | None
    keys: frozenset[str] | None
    headers: Mapping[str, frozenset[str]]
    max_tokens_given: bool
    upper_parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        parts = [name for name, one in self.counts.items() if one.high is None and one.low]
        object.__setattr__(self, "upper_parts", tuple(parts))

    @property
    def is_empty(self) -> bool:
        """Whether it admits no request."""
        return any(interval.is_empty for interval in self.counts.values())

    @property
    def is_everything(self) -> bool:
        """Whether it admits all requests."""
        return _EVERYTHING.within(self)

    def within(self, other: "Reach") -> bool:
        """Return whether all requests in this one are certainly in the other."""
        # What is compared at once comes first: of thousands of classes, most pairs differ in it.
        return (
            all(_header_within(self.headers.get(name), wanted) for name, wanted in other.headers.items())
            and (other.keys is None or (self.keys is not None and self.keys <= other.keys))
            and other.max_tokens_given <= self.max_tokens_given
            and other.reasoning in {None, self.reasoning}
            and other.stream in {None, self.stream}
            and all(self.counts[name].within(other.counts[name]) for name in COUNTED)
            and self._totals(other.output_reserve_tokens).within(other.counts["total_tokens"])
        )

    def _totals(self, reserve_tokens: int) -> Interval:
        """Return the totals of these requests as a class with that reserve computes them.

        They are equal if `max_tokens` is given; otherwise the reserve takes its place.
        """
        total = self.counts["total_tokens"]
        if self.max_tokens_given:
            return total
        more = reserve_tokens - self.output_reserve_tokens
        low = max(total.low + more, self.counts["prompt_tokens"].low)
        return Interval(low, None if total.high is None else total.high + more)

    def without(self, earlier: "Reach") -> "Reach":
        """Return what is left after an earlier class has taken its requests.

        Only removes what is certain and leaves an interval: the upper end of one count, as when an earlier
        class takes all prompts from 16,000 tokens on.
        """
        if not earlier.upper_parts:
            return self
        left = dict(self.counts)
        for name in earlier.upper_parts:
            taken = earlier.counts[name]
            if replace(self, counts=_closed({**self.counts, name: taken})).within(earlier):
                high = left[name].high
                left[name] = replace(
                    left[name], high=taken.low - 1 if high is None else min(high, taken.low - 1)
                )
        return replace(self, counts=left)


def reach(when: When, output_reserve_tokens: int) -> Reach:
    """Return the requests that the condition of a class with that reserve admits."""
    return Reach(
        counts=_closed({name: _interval(getattr(when, name)) for name in COUNTED}),
        output_reserve_tokens=output_reserve_tokens,
        reasoning=when.reasoning,
        stream=when.stream,
        keys=frozenset(when.keys) or None,
        headers={name: frozenset(values) for name, values in when.headers},
        max_tokens_given=bool(when.max_tokens),
    )


def _closed(counts: Mapping[str, Interval]) -> Mapping[str, Interval]:
    """Return the intervals with implied ones: a long prompt or answer implies a long total."""
    total = counts["total_tokens"]
    low = max(total.low, counts["prompt_tokens"].low, counts["max_tokens"].low)
    return {**counts, "total_tokens": replace(total, low=low)}


def _interval(bounds: Iterable[Bound]) -> Interval:
    low, high = range_of(bounds)
    return Interval(low, None if high == inf else int(high))


def _header_within(given: frozenset[str] | None, wanted: frozenset[str]) -> bool:
    return given is not None and (not wanted or (bool(given) and given <= wanted))


_EVERYTHING = reach(When(), 0)
