"""As much of PromQL as it takes to see which metrics and labels a query names. Prometheus knows the rest."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>\s+) | (?P<text>"(?:[^"\\]|\\.)*") | (?P<duration>\[[^\]]*\]|\d+[smhdwy]\b)
    | (?P<number>\d+(?:\.\d+)?) | (?P<name>[A-Za-z_][\w:]*) | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^(){}=<>,])
    """,
    re.X,
)
_OVER_LABELS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"and", "or", "unless", "offset", "bool"})


@dataclass(frozen=True)
class Matcher:
    """`name{label="value"}`; `values` are the alternatives of a pattern."""

    metric: str
    label: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """What a query names.

    Attributes:
        metrics: Metrics and recorded series.
        labels: Labels by which it groups or joins.
        matchers: Conditions on labels.
    """

    metrics: frozenset[str]
    labels: frozenset[str]
    matchers: tuple[Matcher, ...]


def tokens(query: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of a query as (kind, text).

    Raises:
        ValueError: something in it is none.
    """
    at = 0
    while at < len(query):
        match = _TOKEN.match(query, at)
        if match is None:
            raise ValueError(f"not PromQL, at {query[at : at + 20]!r}")
        at = match.end()
        if match.lastgroup not in (None, "space"):
            yield str(match.lastgroup), match.group()


def named(query: str) -> Named:
    """Return what a query names. Functions and aggregations are names that a parenthesis follows."""
    metrics, labels, matchers = set(), set(), []
    found = [*tokens(query), ("end", ""), ("end", ""), ("end", "")]
    at = 0
    while found[at][0] != "end":
        kind, text = found[at]
        if kind == "name" and text in _OVER_LABELS and found[at + 1][1] == "(":
            at += 2
            while found[at][1] != ")":
                if found[at][0] == "name":
                    labels.add(found[at][1])
                at += 1
        elif (
            kind == "name"
            and text not in _WORDS
            and found[at + 1][1] != "("
            and not _is_aggregation(found, at)
        ):
            metrics.add(text)
            if found[at + 1][1] == "{":
                at += 2
                while found[at][1] != "}":
                    if found[at][0] == "name":
                        values = tuple(found[at + 2][1].strip('"').split("|"))
                        matchers.append(Matcher(text, found[at][1], values))
                        at += 2
                    at += 1
        at += 1
    return Named(frozenset(metrics), frozenset(labels), tuple(matchers))


def _is_aggregation(found: list[tuple[str, str]], at: int) -> bool:
    """Return whether a name is that of `sum by (...) (...)`."""
    return found[at + 1][1] in ("by", "without") and found[at + 2][1] == "("
