"""`gemma-gateway replay`: what it prints, and its exit status."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from support.decisions import SITE, Written, classes, line

from gateway.cli import main
from gateway.core.usage import Ending

LONG = {"class": "long_document", "when": {"prompt_tokens": ">= 4000"}, "pools": ["push"]}
NARROW = {"class": "short_chat", "pools": ["light"]}


@pytest.fixture
def tried(tmp_path: Path) -> str:
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump({**SITE, "models": classes(LONG, NARROW)}))
    return str(path)


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments])


def test_for_people(written: Written, tried: str) -> None:
    file = written(line(0), line(1, 5_000), line(2, 300_000, output=9), line(3))
    file.write_bytes(file.read_bytes() + b'{"v":1,"kind":"reque')

    result = replay(str(file), "-c", tried)

    assert result.exit_code == 0
    assert f"{file}:6: it is incomplete" in result.output
    assert "1 of 4 requests move" in result.output
    assert f"class short_chat -> long_document: 1 (such as {file}:3)" in result.output
    assert "1 would be refused (context_length_exceeded), 0 of them not refused before" in result.output
    assert "[context_length_exceeded]." in result.output  # brackets are no markup
    assert "recorded" in result.output
    assert "predicted" in result.output
    assert "how far the simulation of the recorded policy is from what was recorded:" in result.output
    assert "100.0% of what was served is served in the pool that served it" in result.output


def test_without_the_recorded_policy_nobody_is_told_that_nothing_moves(written: Written, tried: str) -> None:
    result = replay(str(written(line(0, 5_000), line(1, 300_000), has_policy=False)), "-c", tried)

    assert result.exit_code == 0
    assert "what moves is not known" in result.output
    assert "no request moves" not in result.output
    assert "1 would be refused (context_length_exceeded); " in result.output


def test_for_programs(written: Written, tried: str) -> None:
    refused = line(2, ending=Ending.REJECTED, status=401, prompt=None)
    result = replay(str(written(line(0), line(1, 5_000), refused)), "-c", tried, "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["undecided"] == {"rejected": 1}
    assert report["moved"] == 1
    assert report["moves"]["pool"] == [
        {"before": "light", "after": "push", "requests": 1, "example": report["files"][0] + ":3"}
    ]
    assert set(report["predicted"]["classes"]) == {"short_chat", "long_document", "(all)"}


def test_several_files_are_one_log(written: Written, tried: str, tmp_path: Path) -> None:
    older = written(line(0)).rename(tmp_path / "decisions.jsonl.1")

    result = replay(str(written(line(1))), str(older), "-c", tried, "--json")

    assert json.loads(result.output)["requests"] == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "there are no requests in it"), (b'{"v":99}\n', "this log has a newer format")],
)
def test_a_log_that_cannot_be_used_is_1(tmp_path: Path, tried: str, content: bytes, says: str) -> None:
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(content)

    result = replay(str(file), "-c", tried)

    assert result.exit_code == 1
    assert says in result.output


def test_a_configuration_that_cannot_be_used_is_2(written: Written, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("listen: 1\n")

    result = replay(str(written(line(0))), "-c", str(tmp_path / "bad.yaml"))

    assert result.exit_code == 2
    assert "bad.yaml" in result.output


@pytest.mark.parametrize("arguments", [[], ["-c", "x"], ["/nowhere/decisions", "-c", "x"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert replay(*arguments).exit_code == 2
