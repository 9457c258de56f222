"""`check` answers for every file: problems or settings, never an exception."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.settings import check

SECTIONS = (
    *("listen", "admin", "tokenizer", "backends", "pools", "models", "profiles", "timeouts"),
    *("routing", "keys", "requests", "health", "shutdown"),
)
INNER = (
    *("url", "profile", "limits", "knee_seqs", "backends", "timeouts", "classes", "class"),
    *("when", "pools", "extends", "capacity", "perf", "key"),
)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(INNER)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=4), inner)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "gateway.yaml"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.dictionaries(st.sampled_from(SECTIONS), values))
def test_any_structure(place: Path, data: dict[str, Any]) -> None:
    place.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    report = check(place, {})
    assert report.ok is (report.settings is not None)
    assert report.ok or report.problems


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 600), junk=st.text(max_size=12))
def test_any_damage_to_a_good_file(place: Path, plain: str, cut: int, junk: str) -> None:
    place.write_bytes((plain[:cut] + junk + plain[cut:]).encode("utf-8", "surrogatepass"))
    report = check(place, {})
    assert report.ok is (report.settings is not None)
    assert report.ok or report.problems


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_bytes(place: Path, raw: bytes) -> None:
    place.write_bytes(raw)
    assert not check(place, {}).ok


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("limits: {kv_blocks: %s}", "backends.light.limits.kv_blocks"),
        ("limits: {context_tokens: %s}", "backends.light.limits.context_tokens"),
        ("modalities: {images_max: %s}", "backends.light.modalities.images_max"),
    ],
)
@pytest.mark.parametrize("number", [2**53 + 1, 10**400], ids=["one-more", "beyond-floats"])
def test_a_number_without_end(place: Path, plain: str, line: str, path: str, number: int) -> None:
    start = plain.index("profile:")
    place.write_text(f"{plain[:start]}{line % number}, {plain[start:]}", encoding="utf-8")

    assert [problem.message for problem in check(place, {}).problems] == [
        f"{path}: it must be at most 9,007,199,254,740,992" + (f", not {number}" if number < 10**40 else "")
    ]


@pytest.mark.parametrize("seconds", ["1e9", "1e18"])
@pytest.mark.parametrize(("section", "key"), [("shutdown", "drain_s"), ("idempotency", "keep_s")])
def test_a_time_without_end(place: Path, plain: str, section: str, key: str, seconds: str) -> None:
    place.write_text(f"{plain}\n{section}: {{{key}: {seconds}}}\n", encoding="utf-8")

    (problem,) = check(place, {}).problems

    assert problem.message.startswith(f"{section}.{key}: it must be less than or equal to 315360000, not ")
