"""What changes from one configuration to the next, in words."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from gateway.core.reloads import Changes
from gateway.settings import changes
from gateway.settings.document import Document

BASE: dict[str, Any] = {
    "tokenizer": "approximate",
    "backends": {
        name: {"url": f"http://10.0.0.{number}:8000", "profile": "h100-tp1-light"}
        for number, name in enumerate(("light-0", "light-1", "push"))
    },
    "pools": {"light": ["light-0", "light-1"], "push": ["push"]},
    "models": {
        "gemma-4": {
            "classes": [
                {"class": "long", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
                {"class": "chat", "pools": ["light"]},
            ]
        }
    },
    "keys": {"a": {"sha256": "0" * 64}},
}
Edit = Callable[[dict[str, Any]], None]


def document(edit: Edit = lambda _: None) -> Document:
    data = deepcopy(BASE)
    edit(data)
    return Document.model_validate(data)


def drop_light_1(data: dict[str, Any]) -> None:
    data["pools"]["light"].remove("light-1")


def remove_light_1(data: dict[str, Any]) -> None:
    drop_light_1(data)
    del data["backends"]["light-1"]


def add_light_2(data: dict[str, Any]) -> None:
    data["backends"]["light-2"] = {"url": "http://10.0.0.9:8000", "profile": "h200-fp8"}
    data["pools"]["light"].append("light-2")


def set_at(*path: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        *places, last, value = path
        for place in places:
            data = data.setdefault(place, {}) if isinstance(data, dict) else data[place]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda _: None, ()),
        (drop_light_1, ("pool light loses light-1; 12 requests finish on it",)),
        (
            remove_light_1,
            (
                "backend light-1 is gone; 12 requests finish on it",
                "pool light loses light-1; 12 requests finish on it",
            ),
        ),
        (
            add_light_2,
            ("backend light-2 is new (h200-fp8, http://10.0.0.9:8000)", "pool light gains light-2"),
        ),
        (set_at("backends", "push", "drain", True), ("backend push: drain false -> true",)),
        (
            set_at("backends", "light-0", "url", "http://h:1"),
            ("backend light-0: url http://10.0.0.0:8000 -> http://h:1; 1 request finishes on it",),
        ),
        (
            set_at("models", "gemma-4", "classes", 0, "when", {"prompt_tokens": ">= 8000"}),
            ("model gemma-4: class long: when.prompt_tokens [>= 16000] -> [>= 8000]",),
        ),
        (
            lambda data: data["models"]["gemma-4"]["classes"].reverse(),
            ("model gemma-4: classes are tried in another order: chat, long",),
        ),
        (
            lambda data: data["models"]["gemma-4"]["classes"].pop(0),
            (
                "pool light: gates.long_prefills 0 -> 1",
                "pool light: gates.prefill_s 0.6 -> none",
                "model gemma-4: class long is gone",
            ),
        ),
        (
            lambda data: data["models"]["gemma-4"]["classes"].append({"class": "rest", "pools": ["push"]}),
            ("model gemma-4: class rest is new",),
        ),
        (set_at("models", "gemma-4", "aliases", ["gemma"]), ("model gemma-4: aliases [] -> [gemma]",)),
        (
            set_at("pools", "push", {"backends": ["push"], "tpot_target_ms": 40}),
            ("pool push: tpot_target_ms none -> 40",),
        ),
        (
            set_at("models", "other", {"classes": [{"class": "all", "pools": ["push"]}]}),
            ("model other is new: all",),
        ),
        (set_at("keys", "a", {"sha256": "1" * 64}), ("key a has changed",)),
        (set_at("keys", "b", {"sha256": "1" * 64}), ("key b is new",)),
        (lambda data: data.pop("keys"), ("callers no longer need an API key", "key a is gone")),
        (
            set_at("allowed_origins", ["https://a.example"]),
            ("allowed_origins [] -> [https://a.example]",),
        ),
        (set_at("routing", "weights", "speed", 0.5), ("routing.weights.speed 1 -> 0.5",)),
        (set_at("health", "interval_s", 0.1234567), ("health.interval_s 1 -> 0.1234567",)),
        (
            set_at("backends", "push", "limits", {"kv_blocks": 1_234_567}),
            ("backend push: limits.kv_blocks the profile's -> 1234567",),
        ),
        (
            set_at(
                "backends",
                "push",
                "limits",
                {"knee_seqs": [{"prompt_tokens": "<= 9", "seqs": 3}, {"seqs": 2}]},
            ),
            (
                "backend push: limits.knee_seqs the profile's -> "
                "[{prompt_tokens: <= 9, seqs: 3}, {prompt_tokens: none, seqs: 2}]",
            ),
        ),
        (
            set_at("backends", "push", "limits", {"kv_blocks": None, "knee_seqs": None}),
            ("backend push: limits.kv_blocks the profile's -> none",),
        ),
        (
            set_at("backends", "push", "modalities", {"images_max": None}),
            ("backend push: modalities.images_max the profile's -> none",),
        ),
        (
            set_at("backends", "push", "versions", ">= 0.20, < 0.24"),
            ("backend push: versions none -> [>= 0.20, < 0.24]",),
        ),
    ],
)
def test_what_takes_effect_at_once(edit: Edit, said: tuple[str, ...]) -> None:
    found = changes(document(), document(edit), {"light-1": 12, "light-0": 1})
    assert found.now == said
    assert found.at_start == ()


def test_limits_that_follow_from_the_kind_of_a_class_change_with_its_conditions() -> None:
    edit = set_at("models", "gemma-4", "classes", 0, "when", {"prompt_tokens": ">= 4000"})

    assert set(changes(document(), document(edit), {}).now) == {
        "pool light: gates.long_prefills 0 -> 1",
        "pool light: gates.prefill_s 0.6 -> none",
        "model gemma-4: class long: when.prompt_tokens [>= 16000] -> [>= 4000]",
        "model gemma-4: class long: waiting.max_wait_s 900 -> 1.2",
        "model gemma-4: class long: waiting.ttft_target_s 60 -> 2",
        "model gemma-4: class long: waiting.prefill_weight 1 -> 4",
    }


def test_limits_that_are_set_do_not_follow_from_the_kind_of_a_class() -> None:
    def own(data: dict[str, Any]) -> None:
        waiting = {"max_wait_s": 30, "ttft_target_s": 5, "prefill_weight": 2}
        data["models"]["gemma-4"]["classes"][0]["waiting"] = waiting
        data["pools"]["light"] = {
            "backends": ["light-0", "light-1"],
            "gates": {"long_prefills": 2, "prefill_s": 3},
        }

    def both(data: dict[str, Any]) -> None:
        own(data)
        data["models"]["gemma-4"]["classes"][0]["when"] = {"prompt_tokens": ">= 4000"}

    assert changes(document(own), document(both), {}).now == (
        "model gemma-4: class long: when.prompt_tokens [>= 16000] -> [>= 4000]",
    )


def test_what_jobs_leave_free_changes_with_whose_requests_a_pool_takes() -> None:
    def queued(data: dict[str, Any]) -> None:
        data["jobs"] = {}
        data["models"]["gemma-4"]["classes"][0]["queue"] = {}

    def unqueued(data: dict[str, Any]) -> None:
        data["jobs"] = {}

    assert set(changes(document(queued), document(unqueued), {}).now) == {
        "pool push: jobs.reserve 0 -> 0.125",
        "pool push: jobs.prefill_s none -> 0.5",
        "model gemma-4: class long: queue {on_disconnect: cancel} -> none",
    }


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (set_at("listen", "0.0.0.0:80"), ("listen",)),
        (set_at("store", "redis://h:6379"), ("store",)),
        (set_at("requests", "max_body_bytes", 5), ("requests",)),
    ],
)
def test_what_needs_a_restart(edit: Edit, said: tuple[str, ...]) -> None:
    assert changes(document(), document(edit), {}) == Changes(at_start=said)


def boxed(edit: Edit = lambda _: None) -> Document:
    def both(data: dict[str, Any]) -> None:
        turns: dict[str, Any] = {"light-0": {"sleep": {}}, "push": {"sleep": {}}}
        data["boxes"] = {"spark": {"default": "push", "backends": turns}}
        edit(data)

    return document(both)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (set_at("backends", "push", "drain", True), Changes(("backend push: drain false -> true",))),
        (
            set_at("backends", "push", "model", "gemma"),
            Changes(at_start=("backend push, which belongs to a box",)),
        ),
        (
            set_at("backends", "push", {**BASE["backends"]["push"], "url": "http://h:1", "drain": True}),
            Changes(("backend push: drain false -> true",), ("backend push, which belongs to a box",)),
        ),
    ],
)
def test_a_backend_of_a_box_can_be_drained_and_nothing_else(edit: Edit, said: Changes) -> None:
    assert changes(boxed(), boxed(edit), {}) == said


def test_every_section_is_one_or_the_other() -> None:
    from gateway.settings.diff import AT_START, LIVE

    assert set(Document.model_fields) >= LIVE
    assert {*LIVE, *AT_START} == set(Document.model_fields)
