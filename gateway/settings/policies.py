"""The policy that a configuration means: figures of profiles, and defaults that depend on other settings."""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Any

from gateway import profiles
from gateway.core.backends import Backend, Capacity, Gates, JobRoom, Modalities, Pool, Spill, Timeouts
from gateway.core.policy import (
    ModelPolicy,
    OnDisconnect,
    Policy,
    ReasoningField,
    RetryPolicy,
    TemplateCosts,
    TrafficClass,
    Waiting,
    Weights,
    When,
    WhenLate,
    range_of,
)
from gateway.core.profile import Profile
from gateway.settings.document import Document
from gateway.settings.fields import Section, curve
from gateway.settings.problems import Finding
from gateway.settings.sections.fleet import BackendSection, GatesSection, JobRoomSection
from gateway.settings.sections.models import ClassSection, ModelSection, WhenSection
from gateway.settings.sections.site_profiles import resolve


class _Kind(Enum):
    """The purpose of a class, for its defaults."""

    CHAT = "chat"
    DOCUMENT = "document"
    REASONING = "reasoning"


DOCUMENT_TOKENS = 8_000
"""A class only for prompts of at least this length is for documents: minutes of waiting are normal for it. A
choice: the longest chat in docs/routing.md#what-it-is-worth."""

KIND_WAITS = ("max_wait_s", "ttft_target_s", "prefill_weight")
"""Names of the waits of a class that depend on its kind, unless it sets them."""

_WAITS = {
    _Kind.CHAT: Waiting(),
    _Kind.DOCUMENT: Waiting(max_wait_s=900.0, ttft_target_s=60.0, prefill_weight=1.0),
    _Kind.REASONING: Waiting(max_wait_s=600.0, ttft_target_s=600.0, prefill_weight=1.0),
}
"""Default waits by the purpose of a class. Documents and reasoning: the targets, and when callers leave, of
docs/routing.md#what-it-is-worth; the reasons for the weights are in docs/routing.md#the-queue."""

CHAT_PREFILL_S = 0.6
"""Default of `gates.prefill_s` for chat pools, in seconds. A choice: with the wait for a slot
(`Waiting.max_wait_s`), it stays within the target of 2 s."""

_STEP_S = 1e-6
"""The shortest step of an engine with which speeds and waits can be calculated. A choice: a
thousandth of any real one."""


def policy_of(document: Document, version: str) -> Policy:
    """Return the policy: everything that decides where a request goes."""
    budgets_s = {name: box.boot_budget_s for box in document.boxes.values() for name in box.backends}
    return Policy(
        models=tuple(_model(name, section) for name, section in document.models.items()),
        pools=pools_of(document),
        backends={
            name: _backend(
                name, section, resolve(document.profiles, section.profile), budgets_s.get(name, 0.0)
            )
            for name, section in document.backends.items()
        },
        weights=Weights(**document.routing.weights.model_dump()),
        retry=RetryPolicy(attempts_max=document.routing.attempts_max),
        reasoning_field=ReasoningField(document.answers.reasoning_field),
        version=version,
    )


def findings(document: Document) -> Iterator[Finding]:
    """Yield values that contradict each other once defaults are known."""
    for name, own in document.profiles.items():
        if own.extends in profiles.names() and resolve(document.profiles, name).perf.lone_step_s() < _STEP_S:
            message = "with these figures a step of its engine takes no time; set `t_fixed` or `t_mem`"
            yield Finding(("profiles", name, "perf"), message)
    for name, backend in document.backends.items():
        if backend.tls.key_file is not None and backend.tls.cert_file is None:
            yield Finding(("backends", name, "tls", "key_file"), "there is no cert_file that it belongs to")
    for model, policy in document.models.items():
        for index, section in enumerate(policy.classes):
            waiting = waiting_of(section)
            if waiting.demoted_wait_s is not None and waiting.demoted_wait_s < waiting.max_wait_s:
                message = (
                    f"this is the total wait, so it cannot be below max_wait_s, {waiting.max_wait_s:g} here"
                )
                yield Finding(("models", model, "classes", index, "waiting", "demoted_wait_s"), message)
            if section.queue is not None and document.jobs is None:
                message = "its chats would become jobs, which are off: add `jobs: {}`"
                yield Finding(("models", model, "classes", index, "queue"), message, at_key=True)


def mixed_pools(document: Document) -> frozenset[str]:
    """Return the pools shared by chats and long documents without a setting that says so."""
    first = _first_pools(document)
    both = first[_Kind.CHAT] & first[_Kind.DOCUMENT]
    return frozenset(name for name in both if document.pools[name].gates.long_prefills is None)


# ------------------------------------------------------------------ models


def _model(name: str, section: ModelSection) -> ModelPolicy:
    return ModelPolicy(
        id=name,
        classes=tuple(_class(one) for one in section.classes),
        aliases=section.aliases,
        reasoning_aliases=section.reasoning_aliases,
        template=TemplateCosts(
            image=section.prompt.image_tokens,
            audio=section.prompt.audio_tokens,
            empty_thought=section.prompt.empty_thought_tokens,
        ),
    )


def _class(section: ClassSection) -> TrafficClass:
    return TrafficClass(
        name=section.name,
        pools=section.pools,
        when=_when(section.when),
        output_reserve_tokens=section.output_reserve_tokens,
        priority=section.priority,
        waiting=waiting_of(section),
        queue=None if section.queue is None else OnDisconnect(section.queue.on_disconnect),
    )


def _when(section: WhenSection) -> When:
    return When(
        prompt_tokens=section.prompt_tokens or (),
        total_tokens=section.total_tokens or (),
        max_tokens=section.max_tokens or (),
        images=section.images or (),
        audios=section.audio or (),
        tools=section.tools or (),
        reasoning=section.reasoning,
        stream=section.stream,
        keys=section.key or (),
        headers=tuple(section.header.items()),
    )


def _kind(section: ClassSection) -> _Kind:
    if section.when.reasoning:
        return _Kind.REASONING
    least, _ = range_of(section.when.prompt_tokens or ())
    return _Kind.DOCUMENT if least >= DOCUMENT_TOKENS else _Kind.CHAT


def waiting_of(section: ClassSection) -> Waiting:
    """Return how requests of a class wait: as it says, or as its kind does."""
    default = _WAITS[_kind(section)]
    return replace(default, **(_given(section.waiting) | {"when_late": WhenLate(section.waiting.when_late)}))


# ------------------------------------------------------------------ pools


def pools_of(document: Document) -> dict[str, Pool]:
    """Return the pools, with the limits that depend on which classes they are for."""
    of_chats, shared = _chat_pools(document), _shared_pools(document)
    return {
        name: Pool(
            name,
            section.backends,
            Timeouts(**(document.timeouts.model_dump() | _given(section.timeouts))),
            _gates(section.gates, is_chat=name in of_chats),
            Spill(**section.spill.model_dump()),
            _job_room(section.jobs, is_shared=name in shared),
            None if section.tpot_target_ms is None else section.tpot_target_ms / 1000,
        )
        for name, section in document.pools.items()
    }


def _chat_pools(document: Document) -> frozenset[str]:
    """Return the pools for chat only: long prompts would block it there, and have another pool."""
    first = _first_pools(document)
    documents = first[_Kind.DOCUMENT]
    return frozenset(first[_Kind.CHAT] - documents) if documents else frozenset()


def _first_pools(document: Document) -> dict[_Kind, set[str]]:
    """Return the pools that are the first choice of each kind of class."""
    first: dict[_Kind, set[str]] = {kind: set() for kind in _Kind}
    for model in document.models.values():
        for one in model.classes:
            first[_kind(one)].add(one.pools[0])
    return first


def _gates(section: GatesSection, *, is_chat: bool) -> Gates:
    default = Gates(long_prefills=0, prefill_s=CHAT_PREFILL_S) if is_chat else Gates()
    return replace(default, **_given(section))


def _shared_pools(document: Document) -> frozenset[str]:
    """Return the pools of classes whose callers wait for their answers, so that jobs leave room there."""
    classes = [one for model in document.models.values() for one in model.classes]
    return frozenset(pool for one in classes if one.queue is None for pool in one.pools)


def _job_room(section: JobRoomSection, *, is_shared: bool) -> JobRoom:
    default = JobRoom() if is_shared else JobRoom(reserve=0.0, prefill_s=None)
    return replace(default, **_given(section))


def _given(section: Section) -> dict[str, Any]:
    """Return the values of a section that are set, by key."""
    return {key: value for key, value in section.model_dump().items() if value is not None}


# ------------------------------------------------------------------ backends


def _backend(name: str, section: BackendSection, profile: Profile, box_budget_s: float) -> Backend:
    """Return a backend. `box_budget_s`: what its box allows for a boot, which is no fault until then."""
    return Backend(
        id=name,
        url=section.url,
        model=section.model,
        profile=section.profile,
        capacity=_capacity(profile.capacity, section),
        modalities=_modalities(profile.modalities, section),
        tokens_per_s=profile.perf.lone_tokens_per_s(),
        boot_budget_s=max(section.boot_budget_s or profile.boot_budget_s, box_budget_s),
        drain=section.drain,
        perf=profile.perf,
        batched_tokens=profile.flags.max_num_batched_tokens,
        versions=section.versions or (),
        quirks=_quirks(profile.quirks, section),
    )


def _capacity(base: Capacity, section: BackendSection) -> Capacity:
    limits = section.limits
    return _shared(
        Capacity(
            context_tokens=limits.context_tokens or base.context_tokens,
            knee=base.knee if limits.knee_seqs is None else curve(limits.knee_seqs),
            kv=base.kv,
            kv_blocks=limits.kv_blocks if "kv_blocks" in limits.model_fields_set else base.kv_blocks,
            kv_budget=limits.kv_budget or base.kv_budget,
        )
    )


@lru_cache(maxsize=256)
def _shared(capacity: Capacity) -> Capacity:
    """Intern equal capacities, because a request's claims are computed once per capacity."""
    return capacity


def _modalities(base: Modalities, section: BackendSection) -> Modalities:
    own = section.modalities
    given = own.model_fields_set
    return Modalities(
        images_max=own.images_max if "images_max" in given else base.images_max,
        audios_max=own.audios_max if "audios_max" in given else base.audios_max,
    )


def _quirks(base: tuple[str, ...], section: BackendSection) -> tuple[str, ...]:
    own = section.quirks
    return tuple(dict.fromkeys(name for name in (*base, *own.add) if name not in own.remove))
