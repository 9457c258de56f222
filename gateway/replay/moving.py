"""Finds requests that another policy routes differently or refuses, independent of load."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from gateway.core import deciding
from gateway.core.errors import GatewayError
from gateway.core.policy import Policy
from gateway.core.request import CountMode
from gateway.core.request_features import RequestFeatures
from gateway.core.selection import BackendView
from gateway.core.value import valueclass
from gateway.replay.reading import Entry, Log


@valueclass(frozen=True, slots=True)
class Move:
    """A number of requests with a changed route; `example` is the position of the first."""

    before: str
    after: str
    requests: int
    example: str


@valueclass(frozen=True, slots=True)
class Refusal:
    """Requests that the other policy refuses immediately, and how many of them only it refuses.

    `words`: the error message for the first of them; `example` is its position.
    """

    code: str
    requests: int
    new: int
    words: str
    example: str


@valueclass(frozen=True, slots=True)
class Verdict:
    """A decision on an idle fleet. A refusal has no pool; `code` and `words` say why."""

    traffic_class: str = ""
    pool: str = ""
    backend: str = ""
    code: str = ""
    words: str = ""


def verdict(
    policy: Policy, idle: Mapping[str, BackendView], asked: RequestFeatures, key: str | None
) -> Verdict:
    """Return a policy's decision about a request on an idle fleet."""
    request, name = asked.request(key), ""
    try:
        model = deciding.model_of(policy, request.model)
        traffic_class, decision = deciding.decide(policy, model, request, asked.estimate, lambda _: idle)
        name = traffic_class.name
        refusal = deciding.refusal(traffic_class, decision, idle)
        if refusal is not None:
            raise refusal
    except GatewayError as error:
        return Verdict(name, code=error.code, words=error.message)
    first = decision.candidates.first
    if first is None:
        return Verdict(name)  # it would wait for a drained backend
    return Verdict(name, first.pool, first.backend)


class Moves:
    """Decides each request under both its recorded policy and the other one."""

    def __init__(self, log: Log, policy: Policy) -> None:
        self._policy = policy
        self._idle = deciding.idle(policy)
        self._recorded = {
            name: (line.policy, deciding.idle(line.policy)) for name, line in log.policies.items()
        }
        self._moves: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
        self._refused: dict[str, list[tuple[Verdict, bool, str]]] = defaultdict(list)
        self._otherwise = 0
        self._bounds = 0
        self.moved = self.accepted = 0

    def add(self, entry: Entry) -> None:
        """Decide a request with recorded features."""
        assert entry.asked is not None
        place, past = f"{entry.file}:{entry.line}", entry.past
        after = verdict(self._policy, self._idle, entry.asked, past.key)
        before = after
        if entry.asked.policy in self._recorded:
            before = verdict(*self._recorded[entry.asked.policy], entry.asked, past.key)
            self._otherwise += bool(past.traffic_class) and past.traffic_class != before.traffic_class
        is_bound = entry.asked.estimate.mode is CountMode.BOUND
        self._bounds += is_bound and entry.asked.estimate.tokens < self._policy.window_tokens
        if after.code:
            self._refused[after.code].append((after, not before.code, place))
        self.accepted += bool(before.code) and not after.code
        changed = [
            (what, one, two)
            for what, one, two in (
                ("class", before.traffic_class, after.traffic_class),
                ("pool", before.pool, after.pool),
                ("backend", before.backend, after.backend),
            )
            if one != two
        ]
        self.moved += bool(changed)
        for what, one, two in changed:
            self._moves[what][one or _nowhere(before), two or _nowhere(after)].append(place)

    def moves(self) -> Mapping[str, Sequence[Move]]:
        """Return the changed routes, most frequent first."""
        return {
            what: [
                Move(one, two, len(places), places[0])
                for (one, two), places in sorted(found.items(), key=lambda item: -len(item[1]))
            ]
            for what in ("class", "pool", "backend")
            for found in [self._moves.get(what, {})]
        }

    def refusals(self) -> Sequence[Refusal]:
        """Return what the other policy refuses, by code."""
        return [
            Refusal(code, len(found), sum(is_new for _, is_new, _ in found), first.words, place)
            for code, found in sorted(self._refused.items())
            for first, _, place in [next((one for one in found if one[1]), found[0])]
        ]

    def notes(self) -> Iterator[str]:
        """Yield caveats about that."""
        if self._otherwise:
            yield (
                f"{self._otherwise} requests get another class when the recorded policy decides them again: "
                "the log lacks something it decided by"
            )
        if self._bounds:
            yield (
                f"{self._bounds} prompts were only counted up to the recorded fleet's largest window; "
                "whether they fit into the other fleet's is not known"
            )


def _nowhere(found: Verdict) -> str:
    return f"refused ({found.code})" if found.code else "nowhere"
