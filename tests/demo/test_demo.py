"""The demo as a newcomer runs it: a real process, and what it leaves behind, which is nothing."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import openai
import pytest
from support.processes import children_of

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "gateway", "demo"]
SMALL = [*DEMO, "--requests", "small", "--speed", "30"]
GONE_S = 20.0


def is_gone(pid: int) -> bool:
    """Wait until a process has ended; return whether it has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], GONE_S)[0])
    finally:
        os.close(handle)


def read_until(stream: IO[str], pattern: str) -> str:
    """Return what a process says up to the line that holds `pattern`."""
    said = ""
    for line in stream:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"it ended without saying {pattern!r}:\n{said}")


@dataclass(frozen=True, slots=True)
class Serving:
    """A demo that has shown everything and goes on serving."""

    process: subprocess.Popen[str]
    said: str
    children: Collection[int]

    def snippet(self, heading: str) -> str:
        """Return what it told to paste, under a heading."""
        found = re.search(rf"^# {re.escape(heading)}\n(.*?)(?:\n\n|\Z)", self.said, re.MULTILINE | re.DOTALL)
        assert found is not None, self.said
        return found.group(1)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A whole run of `demo --serve`, without a terminal, in a folder with a module of another project.

    It shows what `demo` shows, which is all that the README asks a newcomer to run.
    """
    folder = tmp_path_factory.mktemp("other")
    (folder / "httpx.py").write_text("raise SystemExit('not for the gateway')")
    process = subprocess.Popen(
        [DEMO[0], "-P", *DEMO[1:], "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GEMMA_GATEWAY_WORKERS": "2"},
    )
    assert process.stdout is not None
    try:
        said = read_until(process.stdout, r"gemma-gateway explain")
        yield Serving(process, said, children_of(process.pid))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def test_every_class_and_every_backend_is_shown_and_nothing_fails(serving: Serving) -> None:
    table = serving.said[serving.said.index("class  ") :]
    used: dict[str, set[str]] = {}
    traffic_class = ""
    for line in table.splitlines()[1:]:
        if not line.strip():
            break
        cells = line.split()
        if not line.startswith(" "):
            traffic_class = cells.pop(0)
        used.setdefault(traffic_class, set()).add(cells[0])
        assert cells[-1] == "0", line
    assert used == {
        "short_chat": {"light-0", "light-1", "push"},
        "long_document": {"push", "refused"},
        "reasoning": {"tpu", "spark"},
    }
    assert re.search(r"(\d+) requests, .* 1 refused as intended, 0 failed\.", serving.said)


def test_every_kind_of_request_is_told_in_a_line(serving: Serving) -> None:
    for kind in ("chat", "conversation", "document", "image", "tool call", "reasoning"):
        assert re.search(rf"  200 {kind}, ", serving.said), kind
    too_long = re.search(r"  400 too long, ([\d,]+) tokens, ", serving.said)
    assert too_long  # how long depends on the version of Python, whose texts are asked about
    assert 262_144 < int(too_long[1].replace(",", "")) < 400_000
    assert "context_length_exceeded" in serving.said


def test_a_backend_fails_traffic_moves_on_and_it_comes_back(serving: Serving) -> None:
    assert "the demo crashes light-0" in serving.said
    assert "light-0 failed, so it was retried on light-1" in serving.said
    assert re.search(r"light-0: booting → probation", serving.said)
    assert re.search(r"light-0: probation → up", serving.said)


def test_the_box_changes_models_for_jobs_and_back_for_a_request(serving: Serving) -> None:
    # A busy machine may miss what lasts a second: the boots it sees.
    assert re.findall(r"spark-box: booting (\w+):", serving.said) == ["qwen", "spark"]
    assert "spark-box: resident spark: answers correctly" in serving.said
    assert "6 jobs for qwen have ended" in serving.said
    assert "6 jobs submitted, 6 ended. The box swapped models 2 times." in serving.said


def test_the_reasons_of_the_routing_are_told(serving: Serving) -> None:
    for reason in (
        r"tpu: needs 2\d,\d{3} tokens, holds 16,384",
        r"has seen \d+% of its prefix",
        r"prompt 2\d,\d{3} >= 16,000",
        r"spilled: ",
    ):
        assert re.search(reason, serving.said), f"{reason}:\n{serving.said}"
    answered = [line for line in serving.said.splitlines() if "  200 " in line]
    assert sum(line.endswith(")") for line in answered) > 0.9 * len(answered)  # the rest on a busy machine


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_curl_command_works(serving: Serving) -> None:
    answer = subprocess.run(
        ["sh", "-c", serving.snippet("shell")], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert answer.rstrip().endswith("data: [DONE]")


def test_the_python_snippet_works(serving: Serving) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", serving.snippet("Python")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert len(answer.split()) > 3


def test_the_operators_addresses_work(serving: Serving) -> None:
    urls = re.findall(r"http://\S+", serving.snippet("operators"))
    console, *answers = [httpx.get(url, trust_env=False) for url in urls]
    assert [answer.status_code for answer in (console, *answers)] == [200] * 4
    assert "<title>" in console.text
    backends = answers[0].json()
    assert {name: seen["in_flight"] for name, seen in backends.items()} == dict.fromkeys(backends, 0)


def test_the_explain_command_works(serving: Serving) -> None:
    told = serving.snippet("why would it go there?")
    command = told.replace("| gemma-gateway ", f"| {sys.executable} -m gateway ")
    assert command != told
    explained = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "goes to light-0" in explained.stdout


def test_the_served_gateway_refuses_as_it_says(serving: Serving) -> None:
    url = re.search(r'base_url="(\S+)"', serving.snippet("Python"))
    assert url is not None
    with openai.OpenAI(base_url=url.group(1), api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == "model_not_found"


def test_a_port_that_is_taken_is_told(serving: Serving) -> None:
    taken = str(httpx.URL(serving.snippet("operators").split()[0]).port)
    ended = subprocess.run([*SMALL, "--plain", "--port", taken], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.count(f"cannot listen on 127.0.0.1:{taken}") == 1


def test_ctrl_c_ends_the_serving_with_0_and_leaves_nothing(serving: Serving) -> None:
    """The last of the module: it ends what the others use."""
    config = re.search(r"--config (\S+)", serving.said)
    assert config is not None
    assert len(serving.children) == 2
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(timeout=GONE_S) == 0
    assert all(is_gone(child) for child in serving.children)
    assert not Path(config.group(1)).parent.exists()


def test_where_no_jobs_can_be_kept_the_box_changes_models_for_chats(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)  # no socket has such a path
    folder.mkdir()
    environ = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run([*SMALL, "--plain"], capture_output=True, text=True, timeout=180, env=environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"200 chat, .* qwen -> qwen ", ended.stdout)
    summary = " ".join(ended.stdout.split())
    assert "The box swapped models 2 times, for chats: jobs are left out here (the path of " in summary


def test_nothing_outlives_a_demo_that_is_killed_midway(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*SMALL, "--plain"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    )
    assert process.stdout is not None
    read_until(process.stdout, "Documents")
    children = children_of(process.pid)
    process.kill()
    process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=GONE_S) == -signal.SIGKILL
    assert len(children) == 2
    assert all(is_gone(child) for child in children)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["gateway", "fleet"])
def test_a_process_that_dies_is_told_and_is_a_failure(role: str) -> None:
    process = subprocess.Popen(
        [*SMALL, "--plain"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    read_until(process.stdout, "Documents")
    arguments = {
        child: Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in children_of(process.pid)
    }
    os.kill(next(child for child, said in arguments.items() if role in said), signal.SIGKILL)
    said = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=GONE_S) == 1
    _, told, words = said.partition(f"the {role} process ended unexpectedly (status -9)")
    assert told
    assert "http://" not in words
    assert all(is_gone(child) for child in arguments)


def test_on_a_terminal_it_draws_and_ctrl_c_gives_the_terminal_back_and_leaves_nothing(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    window = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environ = {**os.environ, **window, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(SMALL, stdin=follower, stdout=follower, stderr=follower, env=environ)
    os.close(follower)
    drawn = b""
    children: set[int] = set()
    with suppress(OSError):  # how a terminal says that its last user is gone
        while data := os.read(leader, 65536):
            drawn += data
            if b"Documents: prompts of" in drawn and not children:
                children = children_of(process.pid)
                process.send_signal(signal.SIGINT)
    os.close(leader)
    assert process.wait(timeout=GONE_S) == 1
    assert b"\x1b[?1049h" in drawn
    assert drawn.rindex(b"\x1b[?1049l") > drawn.rindex(b"light-0")
    assert b"\x1b[?25h" in drawn  # the cursor is back
    assert drawn.rstrip().endswith(b"interrupted")
    assert len(children) == 2
    assert all(is_gone(child) for child in children)
    assert list(tmp_path.iterdir()) == []
