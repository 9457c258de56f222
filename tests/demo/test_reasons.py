from collections.abc import Mapping
from typing import Any

import pytest

from gateway.demo.reasons import why

SCORES = {"spare_knee": 0.98, "speed": 1.0, "prefix_affinity": 0.0, "slow_context": 0.0}


def candidate(backend: str, pool: str = "light", **fields: Any) -> Mapping[str, Any]:
    scores = {**SCORES, **fields.pop("scores", {})}
    plain = {"backend": backend, "pool": pool, "excluded": None, "detail": "", "scores": scores}
    return {**plain, "score": sum(scores.values()), **fields}


def out(backend: str, reason: str, detail: str, pool: str = "light") -> Mapping[str, Any]:
    return candidate(backend, pool, excluded=reason, detail=detail)


def record(
    backend: str,
    pool: str,
    *candidates: Mapping[str, Any],
    class_reason: str = "takes everything else",
    failed: tuple[str, ...] = (),
    code: str = "",
) -> Mapping[str, Any]:
    attempts = [{"backend": name, "outcome": "failed"} for name in failed]
    attempts += [{"backend": backend, "outcome": "ok"}] if backend else []
    return {
        "backend": backend,
        "pool": pool,
        "error_code": code,
        "attempts": attempts,
        "decision": {
            "traffic_class": "short_chat",
            "class_reason": class_reason,
            "pools": ["light", "push"],
            "candidates": list(candidates),
        },
    }


L0, L1, PUSH = candidate("light-0"), candidate("light-1"), candidate("push", "push")
OVERLONG = out("tpu", "context_exceeded", "needs 22098 tokens, holds 16384")


@pytest.mark.parametrize(
    ("seen", "full", "brief"),
    [
        pytest.param(
            record("light-0", "light", L0, L1, PUSH),
            "no other class matches; light-0 ties with light-1, and is listed first",
            "no other class",
            id="equals",
        ),
        pytest.param(
            record(
                "light-1", "light", candidate("light-1"), candidate("light-0", scores={"spare_knee": 0.5})
            ),
            "no other class matches; light-1 has 98% of its knee free, light-0 50%",
            "no other class",
            id="more-knee-free",
        ),
        pytest.param(
            record(
                "tpu",
                "light",
                candidate("tpu"),
                candidate("spark", scores={"speed": 0.1}),
                class_reason="reasoning is true",
            ),
            "reasoning is true; tpu is faster than spark",
            "reasoning is true",
            id="faster",
        ),
        pytest.param(
            record(
                "spark",
                "light",
                candidate("tpu", scores={"slow_context": -0.4}),
                candidate("spark", scores={"spare_knee": 0.7}),
                class_reason="reasoning is true",
            ),
            "reasoning is true; tpu is busy, and slow at this length",
            "reasoning is true",
            id="slow-at-this-length",
        ),
        pytest.param(
            record("light-1", "light", candidate("light-1", scores={"prefix_affinity": 0.78}), L0),
            "no other class matches; light-1 has seen 78% of its prefix",
            "78% seen before",
            id="prefix",
        ),
        pytest.param(
            record(
                "light-1",
                "light",
                candidate("light-1", scores={"prefix_affinity": 0.9, "prefill_saved_s": 3.24}),
                L0,
            ),
            "no other class matches; light-1 has seen 90% of its prefix, which saves 3.2 s",
            "90% seen before",
            id="prefix-of-a-long-prompt",
        ),
        pytest.param(
            record("push", "light", candidate("push"), class_reason="prompt_tokens 24004 >= 16000"),
            "prompt 24,004 >= 16,000; push has 98% of its knee free",
            "24,004 >= 16,000",
            id="alone-in-its-pool",
        ),
        pytest.param(
            record("spark", "light", candidate("spark"), OVERLONG, class_reason="reasoning is true"),
            "reasoning is true; tpu: needs 22,098 tokens, holds 16,384",
            "too long for tpu",
            id="a-rival-is-too-small",
        ),
        pytest.param(
            record("light-1", "light", L1, out("light-0", "unhealthy", "booting: connection refused")),
            "no other class matches; light-0: booting: connection refused",
            "light-0: booting",
            id="a-rival-is-ill",
        ),
        pytest.param(
            record(
                "light-1", "light", L1, out("light-0", "unhealthy", "the last 3 requests on it have failed")
            ),
            "no other class matches; light-0: the last 3 requests on it have failed",
            "light-0: in doubt",
            id="a-rival-is-in-doubt",
        ),
        pytest.param(
            record("light-1", "light", L0, L1, failed=("light-0",)),
            "no other class matches; light-0 failed, so it was retried on light-1",
            "light-0 failed",
            id="moved-on",
        ),
        pytest.param(
            record(
                "push",
                "push",
                PUSH,
                out("light-0", "at_knee", "64 in flight"),
                out("light-1", "at_knee", "x"),
            ),
            "no other class matches; spilled: light-0 and light-1: at the knee",
            "light is full",
            id="spilled",
        ),
        pytest.param(
            record("push", "push", L0, L1, PUSH),
            "no other class matches; spilled: light had filled up",
            "light is full",
            id="spilled-in-a-race",
        ),
        pytest.param(
            record(
                "",
                "",
                out("push", "context_exceeded", "needs 295812 tokens, holds 262144", "push"),
                class_reason="prompt_tokens 295512 >= 16000",
                code="context_length_exceeded",
            ),
            "prompt 295,512 >= 16,000; push: needs 295,812 tokens, holds 262,144",
            "too long for push",
            id="fits-nowhere",
        ),
        pytest.param(
            {"decision": None, "error_code": "model_not_found"},
            "model_not_found",
            "model_not_found",
            id="undecided",
        ),
        pytest.param(
            record("", "", out("light-0", "modality", "takes no images"), code="unsupported_modality"),
            "no other class matches; light-0: takes no images",
            "light-0 takes no images",
            id="no-images",
        ),
    ],
)
def test_the_reason_is_told_in_full_and_in_brief(seen: Mapping[str, Any], full: str, brief: str) -> None:
    told = why(seen)
    assert (told.full, told.brief) == (full, brief)


def test_what_happened_on_the_way_is_kept_for_the_summary() -> None:
    told = why(record("push", "push", PUSH, out("light-1", "at_knee", "x"), failed=("light-0",)))
    assert told.moved_from == ("light-0",)
    assert told.spilled
    assert told.excluded == (("light-1", "at_knee", "x"),)
