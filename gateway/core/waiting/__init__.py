"""The request queue: which request starts where next, and which is refused instead of waiting. Pure.

Each gateway process has one queue (`WaitingLine`). While any request is queued, every new one enters the
queue, even when backends have room, so that no newcomer overtakes requests waiting for the same slot:

    may_start_at_once(ticket, now) -> whether the queue is empty, so that it overtakes nobody
    start_at_once(ticket, place, now)  then: the request took a slot, without an offer, and runs
    offer_at_once(ticket, candidates, now) -> an offer without a turn, if the queue is empty
    enter(ticket, now)      -> Refused, or None: the request is queued
    turn(now, views)        -> offers, refused requests, and next_turn_at
    started(id, backend, now)  the request took the offered slot and runs
    missed(id, backends, now)  the slot was gone: the request returns to its position
    released(id, backend, now, answered)  the request ended; the queue measures how fast slots become free
    leave(id)                  the caller left

Order: higher priority first. Among the classes of one priority with the same first pool, start-time fair
queueing between API keys: while two keys have queued requests, each gets an equal share of the tokens
started, regardless of how much it sends and in which classes. Tokens started in another first pool do not
count. Within a key, the earliest deadline among requests that can still meet theirs, then the shortest. At
saturation, plain arrival order and plain earliest-deadline-first are about equally bad, because both give
slots to requests that are already late (docs/routing.md). Jobs and demoted requests (`WhenLate.DEMOTE`) come
after all others of their class; within a key, in the order of their arrival.

Blocking: a request that does not fit *holds* the backends of its first pool that are at their knee, out of
KV blocks or busy with prefill. No later request of any class starts there, so that small requests cannot
starve a large one. Once a large one has waited for a second, other processes leave it its room, too
(`note_blocked`). Its class may let it be overtaken `passes_max` times first. The gates for long prompts
hold nothing: a document waiting for another document's prefill does not keep chats off the same backend. A
spill does not hold the other pool's backends either, and a job holds a backend only against other jobs. Nor
does a request hold a backend only because it was refused there: others may be taken.
A request that could start may wait nevertheless, for the busy backend that has its conversation in its
prefix cache, if that saves a prefill (`selection.stay`). It holds that backend as one that does not fit.
A turn looks at a limited number of each class, but of its ordinary requests and of the others apart: of long
prompts, and of those that not every backend of the first pool could take, or one has failed or refused.

Time is an argument, and nothing here waits. The owner of the queue calls `turn` when a slot is released,
when a request enters, and at `next_turn_at`.
"""

from gateway.core.waiting.fairness import LOOKAHEAD, PUT_BACK_TOKENS
from gateway.core.waiting.line import BLOCKED_KNOWN_S, MISS_PAUSE_S, WaitingLine
from gateway.core.waiting.placement import would_stay
from gateway.core.waiting.tickets import (
    Foresight,
    Offer,
    Reason,
    Refused,
    Ticket,
    Turn,
    fastest_prefill_s,
    patient,
)

__all__ = [
    "BLOCKED_KNOWN_S",
    "LOOKAHEAD",
    "MISS_PAUSE_S",
    "PUT_BACK_TOKENS",
    "Foresight",
    "Offer",
    "Reason",
    "Refused",
    "Ticket",
    "Turn",
    "WaitingLine",
    "fastest_prefill_s",
    "patient",
    "would_stay",
]
