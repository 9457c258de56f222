"""Warnings: valid settings that are probably mistakes."""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from hashlib import sha256
from operator import getitem
from urllib.parse import urlsplit

from gateway.core.admission import blocks_planned
from gateway.core.backends import Backend, Capacity
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.quirks import WORKAROUNDS
from gateway.settings.policies import mixed_pools
from gateway.settings.problems import Finding, Known, Problem, no_such_key
from gateway.settings.reach import Reach, reach
from gateway.settings.resolved import Settings
from gateway.settings.sections.site_profiles import resolve
from gateway.settings.tls import authority_faults
from gateway.settings.yaml_tree import Path

GENERIC = "generic"
"""The profile for servers without published figures."""

STREAM_SLOW, PROMPT_SLOW = 1.0, 10.0
"""Tokens per second that a single stream gets, and of a prompt that is read, below which figures are taken
for milliseconds. A choice: far below every measured system, and slower than anybody waits for."""

TPOT_SHORT_S = 0.001
"""Seconds per output token below which a target is taken for a number of seconds. A choice: a fifth of what
a single stream takes on the fastest measured system."""

_PROMPT_TOKENS = 1_000
"""Length of that prompt. A choice: one batch of most engines."""


def warnings(settings: Settings, environ: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return all warnings about a valid configuration, in the order of the file."""
    policy = settings.policy()
    found = [
        *_models(policy),
        *_unused(settings, policy),
        *_profiles(settings),
        *_targets(policy),
        *_backends(settings, policy),
        *_authorities(settings, environ),
        *_boxes(settings, policy),
        *_webhooks(settings),
        *_telemetry(settings),
        *_empty(settings),
        *_exposure(settings),
        *_keys(settings),
        *_priorities(settings),
    ]
    return tuple(sorted(warning.placed(str(settings.path), settings.tree) for warning in found))


# ------------------------------------------------------------------ classes


def _models(policy: Policy) -> Iterator[Finding]:
    for model in policy.models:
        foreign = _pools_of(*policy.models) - _pools_of(model)
        reachable = {
            name for pool in policy.pools.values() if pool.id not in foreign for name in pool.backends
        }
        fleet = [backend for name, backend in policy.backends.items() if name in reachable]
        earlier: list[tuple[str, Reach]] = []
        for index, one in enumerate(model.classes):
            path: Path = ("models", model.id, "classes", index)
            yield from (Finding(path, text) for text in _class(one, earlier, policy, fleet))
            earlier.append((one.name, reach(one.when, one.output_reserve_tokens)))
        yield from _remainder(model)


def _pools_of(*models: ModelPolicy) -> set[str]:
    return {name for model in models for one in model.classes for name in one.pools}


def _class(
    one: TrafficClass, earlier: Sequence[tuple[str, Reach]], policy: Policy, fleet: Sequence[Backend]
) -> Iterator[str]:
    admits = reach(one.when, one.output_reserve_tokens)
    if admits.is_empty:
        yield f"class {one.name} never matches: its conditions exclude each other"
        return
    for name, taken in earlier:
        if admits.within(taken):
            yield f"class {one.name} is never reached: everything it admits already matches class {name}"
            return
    for _, taken in earlier:
        admits = admits.without(taken)
    backends = [policy.backends[name] for name in policy.backends_of(one)]
    yield from _window(one, admits, backends, fleet)
    yield from _modality(one, admits, backends, fleet)


def _window(
    one: TrafficClass, admits: Reach, backends: Sequence[Backend], fleet: Sequence[Backend]
) -> Iterator[str]:
    largest = max(backends, key=_context)
    widest = max((one for one in fleet if _able(one, admits)), key=_context, default=largest)
    held, most = _context(largest), _context(widest)
    if one.output_reserve_tokens >= held:
        yield (
            f"class {one.name} reserves {one.output_reserve_tokens:,} tokens of output; "
            f"its largest backend ({largest.id}) holds {held:,} in all"
        )
    lowest = max(admits.counts["total_tokens"].low, admits.counts["prompt_tokens"].low)
    if lowest > most:
        yield (
            f"class {one.name} begins at {lowest:,} tokens, above every window of the fleet "
            f"({widest.id} holds {most:,}): its requests are all refused with context_length_exceeded"
        )
        return
    upper = _upper_tokens(admits)
    if held < most and (upper is None or upper > held):
        yield (
            f"class {one.name} admits {_lengths(admits)}; its largest backend ({largest.id}) holds "
            f"{held:,} tokens: longer ones are refused with context_length_exceeded, "
            f"though {widest.id} holds {most:,}"
        )


def _modality(
    one: TrafficClass, admits: Reach, backends: Sequence[Backend], fleet: Sequence[Backend]
) -> Iterator[str]:
    elsewhere: list[str] = []
    left_out: list[str] = []
    for dimension, noun in (("images", "images"), ("audios", "audio")):
        if admits.counts[dimension].high == 0 or _takes(backends, dimension):
            continue
        if _takes(fleet, dimension):
            elsewhere.append(noun)
            if admits.counts[dimension].low == 0:  # else they are what the class is for
                left_out.append(f"{noun}: false")
        elif admits.counts[dimension].low > 0:
            yield f"class {one.name} is for {noun}, which no backend takes: its requests are all refused"
    if elsewhere:
        is_last = reach(one.when, one.output_reserve_tokens).is_everything
        remedy = f"; `{', '.join(left_out)}` in its `when` leaves them to later classes"
        yield (
            f"class {one.name} admits {' and '.join(elsewhere)}, which none of its backends "
            f"({', '.join(backend.id for backend in backends)}) takes: such requests are refused"
            f"{remedy if left_out and not is_last else ''}"
        )


def _remainder(model: ModelPolicy) -> Iterator[Finding]:
    last = model.classes[-1]
    if not any(reach(one.when, one.output_reserve_tokens).is_everything for one in model.classes):
        yield Finding(
            ("models", model.id, "classes", len(model.classes) - 1),
            f"requests that match no class of {model.id} are refused; "
            f"a last class without `when` would take them (the last is {last.name})",
        )


def _able(backend: Backend, admits: Reach) -> bool:
    """Return whether a backend accepts the images and audio that every request of a class has."""
    return all(admits.counts[name].low == 0 or _takes([backend], name) for name in ("images", "audios"))


def _takes(backends: Iterable[Backend], dimension: str) -> bool:
    return any(getattr(backend.modalities, f"{dimension}_max") != 0 for backend in backends)


def _upper_tokens(admits: Reach) -> int | None:
    total, prompt, output = (
        admits.counts[name].high for name in ("total_tokens", "prompt_tokens", "max_tokens")
    )
    together = None if prompt is None or output is None else prompt + output
    return min((end for end in (total, together) if end is not None), default=None)


def _lengths(admits: Reach) -> str:
    upper, prompt = _upper_tokens(admits), admits.counts["prompt_tokens"].high
    if upper is not None:
        return f"requests of up to {upper:,} tokens"
    if prompt is not None:
        return f"prompts of up to {prompt:,} tokens with any max_tokens"
    return "prompts of any length"


def _context(backend: Backend) -> int:
    """Return the longest request that fits a backend's window and KV pool."""
    return min(backend.capacity.context_tokens, kv_tokens(backend.capacity))


@lru_cache(maxsize=256)
def kv_tokens(capacity: Capacity) -> int:
    """Return the longest single request that fits the KV budget, at most the window."""
    low, high = 0, capacity.context_tokens
    planned = blocks_planned(capacity)
    if capacity.kv is None or planned is None:
        return high
    while low < high:  # blocks() is monotonic: binary search
        middle = (low + high + 1) // 2
        low, high = (middle, high) if capacity.kv.blocks(middle) <= planned else (low, middle - 1)
    return low


# ------------------------------------------------------------------ backends and the rest


def _unused(settings: Settings, policy: Policy) -> Iterator[Finding]:
    in_pools = {name for pool in policy.pools.values() for name in pool.backends}
    in_classes = _pools_of(*policy.models)
    in_backends = {backend.profile for backend in policy.backends.values()}
    for name in policy.backends.keys() - in_pools:
        yield Finding(("backends", name), f"backend {name} is in no pool: nothing is ever sent to it")
    for name in mixed_pools(settings.document) & policy.pools.keys():
        message = (
            f"pool {name} is for chats and for long documents: while one is read, every chat on its backend "
            "stands still. Give documents a pool of their own, or, if that is intended, set "
            "gates: {long_prefills: 1}"
        )
        yield Finding(("pools", name), message)
    for name in policy.pools.keys() - in_classes:
        yield Finding(("pools", name), f"pool {name} is in no class: nothing is ever sent to it")
    for name in settings.document.profiles.keys() - in_backends:
        yield Finding(("profiles", name), f"profile {name} is used by no backend")


def _profiles(settings: Settings) -> Iterator[Finding]:
    """Yield the profiles that only a mistake in the unit explains."""
    for name in settings.document.profiles:
        own = resolve(settings.document.profiles, name)
        stream = own.perf.lone_tokens_per_s()
        prefill_s = own.perf.prefill_s(_PROMPT_TOKENS, own.flags.max_num_batched_tokens)
        if stream < STREAM_SLOW:
            what = f"a single stream gets {stream:.2g} tokens/s"
        elif prefill_s > _PROMPT_TOKENS / PROMPT_SLOW:
            what = f"prompts are read at {_PROMPT_TOKENS / prefill_s:.2g} tokens/s"
        else:
            continue
        message = f"profile {name}: by its figures {what}; the times in `perf` are seconds, not milliseconds"
        yield Finding(("profiles", name, "perf"), message)


def _targets(policy: Policy) -> Iterator[Finding]:
    """Yield the pools whose target for the time per token only a mistake in the unit explains."""
    for name, pool in policy.pools.items():
        if pool.tpot_target_s is not None and pool.tpot_target_s < TPOT_SHORT_S:
            message = (
                f"pool {name}: no stream gets {1 / pool.tpot_target_s:,.0f} tokens/s; tpot_target_ms is in "
                "milliseconds, not seconds"
            )
            yield Finding(("pools", name, "tpot_target_ms"), message)


def _backends(settings: Settings, policy: Policy) -> Iterator[Finding]:
    for name, backend in policy.backends.items():
        path: Path = ("backends", name)
        section = settings.document.backends[name]
        url = urlsplit(backend.url)
        if url.scheme == "http":
            if not _is_private(url.hostname or ""):
                with_key = section.api_key_env or section.api_key_file
                what = "prompts and its API key" if with_key else "prompts"
                message = (
                    f"backend {name} is reached over plain http outside this network: "
                    f"{what} are sent unencrypted"
                )
                yield Finding((*path, "url"), message)
            if "tls" in section.model_fields_set:
                yield Finding((*path, "tls"), f"backend {name} has an http URL: tls has no effect")
        elif not section.tls.verify:
            yield Finding((*path, "tls", "verify"), f"backend {name}: its certificate is not checked")
        yield from (Finding((*path, "quirks"), text) for text in _quirks(name, settings))
        if _is_guessed(settings, name):
            knee = backend.capacity.knee[0].seqs
            message = f"backend {name}: its knee of {knee} is a guess: set `limits: {{knee_seqs: ...}}`"
            yield Finding((*path, "profile"), message)
        fits = kv_tokens(backend.capacity)
        if fits < backend.capacity.context_tokens:
            yield Finding(
                path,
                f"backend {name}: its KV budget holds a request of {fits:,} tokens, "
                f"its window is {backend.capacity.context_tokens:,}: longer ones are refused",
            )
    for name, pool in policy.pools.items():
        timeouts = pool.timeouts
        if timeouts.total_s < max(timeouts.first_byte_s, timeouts.idle_s):
            own = settings.document.pools[name].timeouts.model_fields_set
            message = f"pool {name}: total_s ends an attempt before first_byte_s or idle_s can"
            yield Finding(("pools", name) if own else ("timeouts",), message)


def _authorities(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the variables that replace the system's authorities, where these are used."""
    users: list[Path] = [
        ("backends", name, "url")
        for name, section in settings.document.backends.items()
        if section.url.startswith("https:") and section.tls.verify and section.tls.ca_file is None
    ]
    users += [("webhooks", name) for name in settings.document.webhooks]
    if users:
        yield from (Finding(users[0], fault) for fault in authority_faults(environ))


def _is_guessed(settings: Settings, name: str) -> bool:
    """Return whether the capacity of a backend is nobody's figure."""
    document = settings.document
    backend = document.backends[name]
    is_generic = backend.profile == GENERIC and GENERIC not in document.profiles
    return is_generic and backend.limits.knee_seqs is None


def _webhooks(settings: Settings) -> Iterator[Finding]:
    if settings.document.webhooks and settings.document.store is None and settings.document.jobs is None:
        yield Finding(("webhooks",), "webhooks without `jobs`: nothing is sent")
    for name, section in settings.document.webhooks.items():
        url = urlsplit(section.url)
        if url.scheme == "http" and not _is_private(url.hostname or ""):
            message = (
                f"webhook {name} is sent over plain http outside this network: "
                "whoever reads it learns job ids"
            )
            yield Finding(("webhooks", name, "url"), message)


def _telemetry(settings: Settings) -> Iterator[Finding]:
    section = settings.document.telemetry
    if section.otlp is None and section.metrics is not None:
        yield Finding(("telemetry", "metrics"), "metrics without `otlp`: nothing is sent")


_OFF_IF_EMPTY: Mapping[Path, str] = {
    ("admin",): "there is no admin port, as with `off`",
    ("jobs",): "there are no jobs; `jobs: {}` is jobs with all defaults",
    ("store",): "there is no store",
    ("decisions",): "no decisions are logged",
    ("telemetry", "otlp"): "nothing is sent",
    ("telemetry", "metrics"): "no metrics are sent; `metrics: {}` sends them with all defaults",
}


def _empty(settings: Settings) -> Iterator[Finding]:
    """Yield keys without a value that turn something off, or exclude nothing: others mean the defaults."""
    data, given = settings.tree.data, settings.tree.values
    for path, effect in _OFF_IF_EMPTY.items():
        if path in given and reduce(getitem, path, data) is None:
            yield Finding(path, f"`{'.'.join(map(str, path))}` is empty: {effect}")
    for model, section in settings.document.models.items():
        for index, one in enumerate(section.classes):
            path = ("models", model, "classes", index, "queue")
            if path in given and one.queue is None:
                message = (
                    f"the `queue` of class {one.name} is empty: its chats are jobs only with `queue: {{}}`"
                )
                yield Finding(path, message)
            for key in sorted(one.when.model_fields_set):
                if getattr(one.when, key) is None:
                    message = f"`{key}` in the `when` of class {one.name} is empty: it excludes no request"
                    yield Finding(("models", model, "classes", index, "when", key), message)


def _boxes(settings: Settings, policy: Policy) -> Iterator[Finding]:
    shared = settings.box_boots_s()
    for model in policy.models:
        for index, one in enumerate(model.classes):
            boots = [shared.get(name, 0.0) for name in policy.backends_of(one)]
            most_s = one.waiting.max_wait_s
            if most_s < min(boots, default=0.0):
                yield Finding(
                    ("models", model.id, "classes", index),
                    f"class {one.name} waits {most_s:g} s at most, and its models take turns with others: "
                    f"a boot takes {min(boots):g} s, so its requests are refused while they are out, "
                    "and never bring them in",
                )


def _quirks(name: str, settings: Settings) -> Iterator[str]:
    section = settings.document.backends[name]
    own, base = section.quirks, settings.profile(name).quirks
    for quirk in own.add:
        if quirk in base:
            yield f"backend {name}: its profile has the quirk {quirk} already"
        elif quirk not in WORKAROUNDS:
            yield f"backend {name}: the gateway has no remedy for the quirk {quirk}: adding it has no effect"
    for quirk in own.remove:
        if quirk not in base:
            yield f"backend {name}: its profile has no quirk {quirk} to remove"


_PASSWORD = re.compile(r"://[^@]*:[^@]+@|[?&]password=[^&]")


def _exposure(settings: Settings) -> Iterator[Finding]:
    if settings.document.keys is None and not _is_loopback(settings.listen.host):
        message = "no `keys`, and `listen` is not a loopback address: everyone who can reach it may use it"
        yield Finding(("listen",), message)
    if settings.document.keys is None and "*" in settings.document.allowed_origins:
        message = "no `keys`, and every origin is allowed: any web page may use it in its visitor's browser"
        yield Finding(("allowed_origins",), message)
    if settings.admin is not None and not _is_loopback(settings.admin.host):
        message = "the admin address is not a loopback one: everyone who can reach it sees status and metrics"
        yield Finding(("admin",), message)
    path = settings.tree.known(("store", "url"))
    if settings.document.store is not None and path:
        written = settings.tree.substituted.get(path, settings.document.store.url)
        if _PASSWORD.search(written):
            message = (
                "the store's password is in this file, which the admin port shows: "
                "write it as ${NAME}, from an environment variable"
            )
            yield Finding(path, message)


_OF_NOTHING = sha256(b"").hexdigest()


def _keys(settings: Settings) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for name, section in (settings.document.keys or {}).items():
        if section.sha256 is None:
            continue
        digest, path = section.sha256.lower(), ("keys", name, "sha256")
        if digest == _OF_NOTHING:
            yield Finding(path, f"key {name}: this is the SHA-256 of empty text, which no caller's key has")
        elif digest in seen:
            yield Finding(path, f"key {name} is the same as key {seen[digest]}: its callers count as {name}")
        seen[digest] = name


def _priorities(settings: Settings) -> Iterator[Finding]:
    jobs, known = settings.document.jobs, Known(settings.document.keys or {})
    for name in {} if jobs is None else jobs.priorities:
        if name not in known:
            suggestion, _ = known.instead_of(name)
            message = f"{no_such_key(name, suggestion)}; nobody has this priority"
            yield Finding(("jobs", "priorities", name), message, suggestion)


_LOCAL_ENDINGS = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc", ".cluster.local")


def _is_private(host: str) -> bool:
    """Return whether a host is internal: a private address, a name without dots, a local domain."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(_LOCAL_ENDINGS)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
