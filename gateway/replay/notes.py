"""Caveats about the figures of a replay."""

from collections.abc import Collection, Iterator, Sequence

from gateway.core.policy import Policy
from gateway.core.request_features import OTHER, matched_headers
from gateway.core.usage import Ending
from gateway.replay.reading import Entry, Log
from gateway.replay.simulating import Past
from gateway.telemetry.decision_lines import PolicyLine


def notes(
    log: Log, base: PolicyLine | None, other: Policy, boxes: Collection[str], pasts: Sequence[Past]
) -> Iterator[str]:
    """Yield one sentence each. `base`: the recorded policy, if it is in the log. `boxes`: the other ones."""
    if log.repeated:
        yield f"{log.repeated} requests are in more than one of the files: each counts once"
    decided = log.decided
    if base is None:
        yield "the recorded policy is not in the log: there is nothing to compare the other one with"
    else:
        yield from _policies(decided, base)
        yield from _fleets(base.policy, other)
        yield from _waits(base.policy, other)
    yield from _unknown_features(decided, other)
    guessed = sum(past.is_guessed and past.entry.past.ending is not Ending.REJECTED for past in pasts)
    if guessed:
        yield (
            f"{guessed} of {len(pasts)} answers were not completed, or came without usage: they are assumed "
            "to be as long as the median of their class"
        )
    out = sum(any(why in _OUT for why in entry.past.out.values()) for entry in decided)
    if out:
        yield (
            f"{out} requests arrived while a backend was out (down, drained, or with another model); the "
            "simulation has all of them up"
        )
    if boxed := {*boxes, *(() if base is None else base.boxes)}:
        yield f"box {', '.join(sorted(boxed))}: the simulation runs all its models at once"
    pools = [pool.id for pool in other.pools.values() if pool.tpot_target_s is not None]
    if pools:
        yield f"pool {', '.join(pools)}: the simulation does not follow tpot_target_ms"


_OUT = frozenset({"unhealthy", "draining", "swapped_out", "wrong_model", "wrong_version", "not_asked"})


def _policies(decided: Sequence[Entry], base: PolicyLine) -> Iterator[str]:
    own = sum(entry.past.policy == base.version for entry in decided)
    if own < len(decided):
        versions = len({entry.past.policy for entry in decided})
        yield (
            f"{versions} configurations were in force; {base.version} is simulated, under which {own} of "
            f"{len(decided)} requests were decided"
        )


def _fleets(old: Policy, new: Policy) -> Iterator[str]:
    gone, added = sorted({*old.backends} - {*new.backends}), sorted({*new.backends} - {*old.backends})
    if gone or added:
        said = [f"without {', '.join(gone)}"] if gone else []
        said += [f"with {', '.join(added)} added"] if added else []
        yield (
            f"the log was recorded with {len(old.backends)} backends, the other policy has "
            f"{len(new.backends)}: {' and '.join(said)}"
        )
    kept = [name for name in old.backends if name in new.backends]
    other = [name for name in kept if old.backends[name].capacity != new.backends[name].capacity]
    if other:
        yield f"capacity differs from the recorded one: {', '.join(sorted(other))}"


def _waits(old: Policy, new: Policy) -> Iterator[str]:
    """Yield the classes that are shed and called late by other limits than before."""
    limits = [
        {
            (model.id, one.name): {
                "max_wait_s": one.waiting.max_wait_s,
                "ttft_target_s": one.waiting.ttft_target_s,
            }
            for model, one in policy.classes()
        }
        for policy in (old, new)
    ]
    for key, before in limits[0].items():
        after = limits[1].get(key, before)
        changed = [
            f"{name} was {before[name]:g}, is {after[name]:g}"
            for name in before
            if before[name] != after[name]
        ]
        if changed:
            yield f"class {key[1]}: {', '.join(changed)}; `shed` and `late` follow each policy's own"


def _unknown_features(decided: Sequence[Entry], policy: Policy) -> Iterator[str]:
    """Yield conditions of the other policy on features that the log does not contain."""
    conditions = [one.when for _, one in policy.classes()]
    if any(when.keys for when in conditions) and all(entry.past.key is None for entry in decided):
        yield "the other policy has conditions on API keys, but the log has no key names"
    for name in sorted({name for when in conditions for name, _ in when.headers}):
        having = [
            entry.asked.headers[name] for entry in decided if entry.asked and name in entry.asked.headers
        ]
        if not having:
            yield (
                f"the other policy has a condition on header {name}, but no line has it: the log holds only "
                "headers that the recorded policy had conditions on"
            )
        named = any(matched_headers(policy, model.id).get(name) for model in policy.models)
        unnamed = sum(value is OTHER for value in having)
        if named and unnamed:
            yield (
                f"{unnamed} requests had a value in header {name} that no recorded condition named: the "
                "other policy is assumed not to name it either"
            )
