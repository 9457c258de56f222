"""Encodes and decodes the facts that gateway processes exchange through Redis, as JSON.

The hash that holds them can be written by anyone with access to the server. So everything read is validated,
including the range of each number; invalid facts and other versions are ignored.

    {"v": 1,
     "verdicts": {"light-0": {"number": 1, "state": "ejected", "reason": "..", "left_s": 4, "ejections": 1}},
     "attempts": {"light-0": [served, failed]},
     "ratios": {"latin": [answers, mean_log]}, "margin": p99_tokens,
     "started": [["gemma-4", "short_chat", "name of a key or null", tokens]],
     "long_waiting": {"push": 2}, "reading": {"push": left_s},
     "knee_shares": {"light-0": 900000},
     "blocked": {"push": [waited_s, seqs, share, kv_blocks]},
     "hashing": -123, "conversations": {"light-0": [[number, key]]}}
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.core.admission import WHOLE
from gateway.core.class_counts import TextKind
from gateway.core.conversations import TOLD_MAX, Conversations
from gateway.core.facts import Attempts, Blocked, Facts, Learned, Ratio
from gateway.core.health import State, Verdict
from gateway.core.load import Load
from gateway.core.value import valueclass
from gateway.events import about

log = logging.getLogger("gateway.store")

VERSION = 1
"""Version of the form of facts. Those of another are ignored."""

BYTES_MAX = 262_144
"""Maximum size of a process's facts. A choice: enough for 256 callers with names of 200 characters, and 200
backends of which none takes anything, for the longest of reasons: 156 KB."""

REASON_CHARS_MAX = 300
"""Maximum characters of a verdict's reason. A choice: it is for a line of the log."""

FEW_MAX = 10_000
"""Larger counts of ejections or waiting long prompts are sent as this. A choice: no difference counts above.
A number out of range would make all facts of a gateway invalid."""

LEFT_MAX_S = 86_400.0
"""Maximum remaining time of a verdict or a prefill. A choice: a day; longer ones are sent as this, for the
same reason."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Few = Annotated[int, Meta(ge=0, le=FEW_MAX)]
_Left = Annotated[float, Meta(ge=0, le=LEFT_MAX_S)]
_Share = Annotated[int, Meta(ge=1, le=WHOLE)]
_Hash = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_KINDS = {kind.value: kind for kind in TextKind}


class _Verdict(Struct):
    number: Annotated[int, Meta(ge=1, le=2**53)]
    state: Literal["ejected", "draining"]
    reason: str
    left_s: _Left
    ejections: _Few = 0


class _Version(Struct):
    v: int


class _Document(Struct):
    v: Literal[1] = 1
    verdicts: dict[str, _Verdict] = {}
    attempts: dict[str, tuple[_Count, _Count]] = {}
    ratios: dict[str, tuple[_Few, Annotated[float, Meta(ge=-1, le=1)]]] = {}
    margin: _Count = 0
    started: list[tuple[str, str, str | None, _Count]] = []
    long_waiting: dict[str, _Few] = {}
    reading: dict[str, _Left] = {}
    knee_shares: dict[str, _Share] = {}
    blocked: dict[str, tuple[_Left, _Count, _Count, _Count]] = {}
    hashing: _Hash = 0
    conversations: dict[str, Annotated[list[tuple[_Count, _Hash]], Meta(max_length=TOLD_MAX)]] = {}


def encode(facts: Facts) -> str:
    """Encode facts as JSON."""
    document = _Document(
        verdicts={
            name: _Verdict(
                number=verdict.number,
                state="draining" if verdict.state is State.DRAINING else "ejected",
                reason=_plain(verdict.reason),
                left_s=_left(verdict.left_s),
                ejections=min(verdict.ejections, FEW_MAX),
            )
            for name, verdict in facts.verdicts.items()
        },
        attempts={name: (attempts.served, attempts.failed) for name, attempts in facts.attempts.items()},
        ratios={kind.value: (ratio.answers, ratio.mean_log) for kind, ratio in facts.learned.ratios.items()},
        margin=facts.learned.p99_tokens,
        started=[(*flow, tokens) for flow, tokens in facts.started.items()],
        long_waiting={name: min(count, FEW_MAX) for name, count in facts.long_waiting.items()},
        reading={name: _left(left_s) for name, left_s in facts.reading.items()},
        knee_shares=dict(facts.knee_shares),
        blocked={
            name: (_left(one.waited_s), one.claim.seqs, one.claim.share, one.claim.kv_blocks)
            for name, one in facts.blocked.items()
        },
        hashing=facts.conversations.hashing,
        conversations={name: list(told) for name, told in facts.conversations.answered.items()},
    )
    return msgspec.json.encode(document).decode()


def decode(text: str) -> Facts | None:
    """Decode JSON to facts; None if they are of another version.

    Raises:
        ValueError: the text cannot come from any version.
    """
    if len(text.encode()) > BYTES_MAX:
        raise ValueError(f"longer than {BYTES_MAX} bytes")
    try:
        if msgspec.json.decode(text, type=_Version).v != VERSION:
            return None
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return Facts(
        verdicts={
            name: Verdict(told.number, State(told.state), _plain(told.reason), told.left_s, told.ejections)
            for name, told in document.verdicts.items()
        },
        attempts={name: Attempts(*counts) for name, counts in document.attempts.items()},
        learned=Learned(
            {_KINDS[name]: Ratio(*ratio) for name, ratio in document.ratios.items() if name in _KINDS},
            document.margin,
        ),
        started={(model, name, key): tokens for model, name, key, tokens in document.started},
        long_waiting=document.long_waiting,
        reading=document.reading,
        knee_shares=document.knee_shares,
        blocked={name: Blocked(told[0], Load(*told[1:])) for name, told in document.blocked.items()},
        conversations=Conversations(
            document.hashing, {name: tuple(told) for name, told in document.conversations.items()}
        ),
    )


def _left(left_s: float) -> float:
    return min(round(left_s, 3), LEFT_MAX_S)


def _plain(reason: str) -> str:
    """Return a reason that is safe for a log line: bounded in length, and printable."""
    return "".join(char if char.isprintable() else " " for char in reason[:REASON_CHARS_MAX])


@valueclass(frozen=True, slots=True)
class PeerFacts:
    """The facts of another process, as received from the server.

    Attributes:
        owner: Its name.
        left_s: Seconds until it is considered gone, unless it sends another heartbeat.
        text: Its encoded facts.
    """

    owner: str
    left_s: float
    text: str


@valueclass(frozen=True, slots=True)
class _Peer:
    text: str
    facts: Facts | None
    told_at: float
    ends_at: float


class Exchange:
    """Publishes this process's facts and receives those of its peers, each valid while its process lives.

    Does no I/O: the client of the server asks for `outgoing` and passes replies to `incoming`. The facts of
    a peer remain valid until they expire by the server's clock, even if the server is unreachable or has
    lost them: neither says anything about the peer.
    """

    def __init__(self, ttl_s: float, poke: Callable[[], None]) -> None:
        """Keep facts of peers for at most `ttl_s`. `poke` triggers an exchange with the server at once."""
        self._ttl_s, self._poke = ttl_s, poke
        self._collect: Callable[[], Facts] | None = None
        self._heard: Callable[[Mapping[str, Facts]], None] = lambda facts: None
        self._peers: dict[str, _Peer] = {}
        self._is_urgent = False
        self._complained: set[str] = set()

    def join(self, collect: Callable[[], Facts], heard: Callable[[Mapping[str, Facts]], None]) -> None:
        """Publish the result of `collect`, and call `heard` with all peers' facts after every exchange."""
        self._collect, self._heard = collect, heard

    def publish_now(self) -> None:
        """Publish this process's facts at once, and have its peers read them at once."""
        self._is_urgent = True
        self._poke()

    def outgoing(self) -> tuple[str, bool]:
        """Return the facts to publish, "" for none, and whether its peers should read them at once."""
        is_urgent, self._is_urgent = self._is_urgent, False
        text = "" if self._collect is None else encode(self._collect())
        size_bytes = len(text.encode())
        if size_bytes <= BYTES_MAX:
            return text, is_urgent
        self._complain("too long", "this gateway's facts are too long to be shared: %d bytes", size_bytes)
        return "", False

    def not_sent(self, is_urgent: bool) -> None:
        """Note that the outgoing facts may not have arrived."""
        self._is_urgent = self._is_urgent or is_urgent

    def incoming(self, told: Iterable[PeerFacts], now: float) -> None:
        """Apply the facts received at `now` (monotonic seconds)."""
        for one in told:
            before = self._peers.get(one.owner)
            is_same = before is not None and before.text == one.text
            facts = before.facts if before is not None and is_same else self._decoded(one)
            ends_at = now + min(one.left_s, self._ttl_s)
            self._peers[one.owner] = _Peer(one.text, facts, now, ends_at)
        self.fade(now)
        self._tell()

    def fade(self, now: float) -> None:
        """Remove expired peers."""
        gone = [owner for owner, peer in self._peers.items() if peer.ends_at <= now]
        for owner in gone:
            del self._peers[owner]
        if gone:
            self._tell()

    def ages(self, now: float) -> Mapping[str, float]:
        """Return, per live peer, how many seconds ago it was last heard from."""
        return {owner: now - peer.told_at for owner, peer in self._peers.items()}

    def _tell(self) -> None:
        self._heard({owner: peer.facts for owner, peer in self._peers.items() if peer.facts is not None})

    def _decoded(self, told: PeerFacts) -> Facts | None:
        try:
            return decode(told.text)
        except ValueError as error:
            text = "the facts from gateway %.100r cannot be read (%.200s); further cases are not logged"
            self._complain("unreadable", text, told.owner, error)
            return None

    def _complain(self, what: str, text: str, *arguments: object) -> None:
        if what not in self._complained:
            self._complained.add(what)
            log.error(text, *arguments, extra=about("facts_unshared", reason=what))
