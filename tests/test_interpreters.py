"""With which code a process of the gateway's runs."""

import sys
from pathlib import Path

import pytest

from gateway import interpreters


@pytest.mark.parametrize("is_in", [True, False])
def test_the_current_folder_counts_if_it_does_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)] if is_in else sys.path)
    assert ("-P" in interpreters.command("gateway.worker")) != is_in


def test_the_current_folder_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "-P" in interpreters.command("gateway.worker")
