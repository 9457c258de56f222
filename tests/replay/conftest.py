"""Policies, and logs of what was decided under them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.decisions import SITE, Configure, Logged, Written

from gateway import settings
from gateway.replay import reading
from gateway.settings import Settings
from gateway.telemetry import decision_lines
from gateway.telemetry.decision_lines import RequestLine


@pytest.fixture
def configured(tmp_path: Path) -> Configure:
    """Return a function that makes a policy of `SITE`, with these sections in place of its own."""

    def configure(**sections: Any) -> Settings:
        path = tmp_path / "tried.yaml"
        path.write_text(yaml.safe_dump({**SITE, **sections}))
        return settings.load(path, {})

    return configure


@pytest.fixture
def written(tmp_path: Path, configured: Configure) -> Written:
    """Return a function that writes the log of a gateway with `SITE`, or with another policy."""

    def write(*lines: RequestLine, policy: Settings | None = None, has_policy: bool = True) -> Path:
        recorded = policy or configured()
        version = recorded.version
        path = tmp_path / "decisions.jsonl"
        own = [msgspec.structs.replace(one, policy=one.policy or version) for one in lines]
        head = decision_lines.policy_line(recorded.policy(), recorded.engines(), recorded.box_members())
        rest = [msgspec.json.encode(one) + b"\n" for one in own]
        path.write_bytes(b"".join([head, *rest] if has_policy else rest))
        return path

    return write


@pytest.fixture
def logged(written: Written) -> Logged:
    """Return a function that writes such a log, and reads it."""
    return lambda *lines, **options: reading.read([written(*lines, **options)])
