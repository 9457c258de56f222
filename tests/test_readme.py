"""Every command and every snippet of the README, run."""

import json
import re
import sys
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from support import clients
from support.processes import running
from support.site import site
from support.vocabulary import gemma_like

from gateway.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line.strip() for block in blocks("sh") for line in block.splitlines() if line.strip()]


def test_these_are_the_commands_of_the_readme() -> None:
    """A command that is added here needs a test below.

    What the first one shows is looked at in demo/test_demo.py; installing it is what CI does first.
    """
    assert COMMANDS == [
        "pip install . && gemma-gateway demo",
        "pip install '.[test]' && pytest",
        "gemma-gateway check config/mixed-fleet.yaml",
        "gemma-gateway serve config/mixed-fleet.yaml",
        "gemma-gateway vocab build tokenizer.json -o gemma4.tiktoken",
        'echo \'{"model": "gemma-4", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}\''
        " > request.json",
        "gemma-gateway explain --config config/mixed-fleet.yaml request.json",
    ]


def test_ci_runs_the_test_command_as_it_stands() -> None:
    assert "\npip install '.[test]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_check() -> None:
    result = CliRunner().invoke(main, ["check", str(ROOT / "config" / "mixed-fleet.yaml")])

    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "ok")


async def test_serve(tmp_path: Path) -> None:
    """On free ports: those of the file may be taken on this machine."""
    file = tmp_path / "mixed-fleet.yaml"
    shipped = (ROOT / "config" / "mixed-fleet.yaml").read_text()
    file.write_text(re.sub(r"^(listen|admin): \S+", r"\1: 127.0.0.1:0", shipped, flags=re.MULTILINE))
    async with running("serve", str(file)) as gateway:
        url = (await gateway.wait_for(r"serves (http://\S+)/v1"))[1]
        async with clients.http(base_url=url) as client:
            assert "gemma-4" in (await client.get("/v1/models")).text
            assert (await client.get("/readyz")).status_code == 503  # its backends are not here


async def test_the_sdk_snippet(tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    async with site(tmp_path) as fleet:
        script = snippet.replace("http://127.0.0.1:8080", fleet.url)
        assert script != snippet
        result = await anyio.run_process([sys.executable, "-c", script])

    assert result.stdout.strip()


def test_the_policy_in_it_is_valid(tmp_path: Path) -> None:
    (policy,) = blocks("yaml")
    file = tmp_path / "gateway.yaml"
    file.write_text(policy)

    result = CliRunner().invoke(main, ["check", str(file)])

    assert (result.exit_code, "warning" in result.output) == (0, False), result.output


@pytest.mark.usefixtures("in_an_empty_folder")
def test_vocab_build() -> None:
    Path("tokenizer.json").write_text(json.dumps(gemma_like()))

    result = CliRunner().invoke(main, ["vocab", "build", "tokenizer.json", "-o", "gemma4.tiktoken"])

    assert result.exit_code == 0, result.output
    assert Path("gemma4.tiktoken").stat().st_size > 0
    Path("text.txt").write_text("The river runs past the old mill.")
    counted = CliRunner().invoke(main, ["tokens", "--vocab", "gemma4.tiktoken", "text.txt"])
    assert "tokens (exact)" in counted.output


def test_explain(tmp_path: Path) -> None:
    (echo,) = [command for command in COMMANDS if command.startswith("echo")]
    file = tmp_path / "request.json"
    file.write_text(re.findall(r"'(.*)'", echo)[0])

    result = CliRunner().invoke(
        main, ["explain", "--config", str(ROOT / "config/mixed-fleet.yaml"), str(file)]
    )

    assert result.exit_code == 0
    assert "goes to light-0" in result.output


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
