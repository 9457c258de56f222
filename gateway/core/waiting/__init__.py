"""The waiting line: who starts where next, and who is told that waiting will not help. Pure.

One line per gateway process. Every request enters it while anybody waits, also when nothing is full, so that
no newcomer passes those that wait for the same place:

    enter(ticket, now)      -> Refused, or None: it waits
    offer_at_once(ticket, candidates, now) -> the same as an offer in its turn, where nobody waits
    turn(now, views)        -> offers: who may start where; refused: who waited too long; look_again_at
    started(id, now)           the place was taken; the request runs
    missed(id, backends, now)  it was gone: back to its place in the line
    released(id, backend, now, answered)  it ended; the line measures how fast places come free
    leave(id)                  the caller left

Order. The higher priority first. Among the classes of one priority with the same first pool, start-time
fair queueing between API keys: each key's share of the tokens started is equal while both have something
waiting, however much one of them sends, and in whatever class. What a key starts in another first pool is
not held against it. Within a key, the earliest deadline among those that can still be met, then the
shortest: at saturation, plain order of arrival and plain earliest-deadline are nearly as bad as each other,
because both spend the place on what is late already (docs/routing.md). A request that was sent behind
(`WhenLate.DEMOTE`) comes after all others of its class.

Who blocks whom. A request that does not fit *holds* the backends of its first pool that are at their
knee, out of KV blocks or busy with prompts: nobody after it is started there, whatever its class, so that
small requests cannot starve a large one. Its class may allow it to be passed `passes_max` times before
that. The gates for long prompts hold nothing: a document that waits for another to be read does not keep
chats from the same backend. Nor does a spill hold the other pool's backends.

Time is an argument. Nothing here waits; whoever owns the line calls `turn` when something was freed, when
somebody entered, and at `look_again_at`.
"""

from gateway.core.waiting.fairness import LOOKAHEAD, PUT_BACK_TOKENS
from gateway.core.waiting.line import MISS_PAUSE_S, RETRY_AFTER_MAX_S, WaitingLine
from gateway.core.waiting.tickets import (
    Offer,
    Reason,
    Refused,
    Ticket,
    Turn,
    Waiter,
    fastest_prefill_s,
    patient,
)

__all__ = [
    "LOOKAHEAD",
    "MISS_PAUSE_S",
    "PUT_BACK_TOKENS",
    "RETRY_AFTER_MAX_S",
    "Offer",
    "Reason",
    "Refused",
    "Ticket",
    "Turn",
    "Waiter",
    "WaitingLine",
    "fastest_prefill_s",
    "patient",
]
