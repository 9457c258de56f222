"""What would be decided, asked of a running gateway: over HTTP, and by `gemma-gateway explain --live`."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import yaml
from click.testing import CliRunner, Result
from support import clients
from support.raw_server import always, raw_server
from support.site import Site, simulated, site

from gateway.cli import main
from gateway.core.health import PeerVerdict, State, Verdict
from gateway.core.load import Load
from gateway.ports import Slot

SECRET_TEXT = "Rumpelstiltskin is my name"
CHAT = {"model": "gemma-4", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
MODELS = {
    "gemma-4": {
        "classes": [
            {"class": "gold", "when": {"header": {"x-tier": "gold"}}, "pools": ["push"]},
            {"class": "thinking", "when": {"reasoning": True}, "pools": ["push"]},
            {"class": "short_chat", "pools": ["light", "push"]},
        ]
    }
}


@asynccontextmanager
async def explained(folder: Path, **sections: Any) -> AsyncIterator[Site]:
    simulators = simulated({"light": "h100-tp1-light", "push": "h100-tp2-push"})
    pools = {"light": ["light"], "push": ["push"]}
    async with site(folder, fleet=simulators, pools=pools, models=MODELS, **sections) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Site]:
    async with explained(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A gateway for all who only ask, and of whose answer nothing depends on who asked before."""
    async with explained(tmp_path_factory.mktemp("standing"), health={"interval_s": 5}) as running:
        yield running


async def asked(fleet: Site, **question: Any) -> httpx.Response:
    async with clients.http(base_url=fleet.admin_url) as http:
        return await http.post("/admin/explain", json=question)


async def sent(fleet: Site, headers: dict[str, str] | None = None, **fields: Any) -> str:
    async with fleet.http() as http:
        body = {**CHAT, "max_tokens": 3, **fields}
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        return answer.headers["x-request-id"]


def config(fleet: Site, **changes: Any) -> str:
    document = yaml.safe_load(fleet.gateway.settings.source)
    return yaml.safe_dump({**document, **changes})


def candidate(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in found["decision"]["candidates"] if one["backend"] == name]
    return dict(one)


async def test_the_fleet_is_taken_as_it_stands(fleet: Site) -> None:
    idle = (await asked(fleet, request=CHAT)).json()
    load = Load(seqs=3, share=900_000)
    slot = await fleet.gateway.ledger.acquire("light", load, Load(99, 10**6, 10**6, 99, 99, 10**6))
    busy = (await asked(fleet, request=CHAT)).json()
    await fleet.gateway.ledger.release(slot)  # type: ignore[arg-type]

    assert idle["fleet"] == "live"
    assert idle["outlook"] == {"waiting": 0, "expected_wait_s": 0.0, "max_wait_s": 1.2}
    assert candidate(idle, "light")["scores"]["spare_knee"] > 0.9
    assert candidate(busy, "light")["scores"]["spare_knee"] < 0.1
    assert candidate(busy, "light")["load"]["seqs"] == 3


@pytest.mark.parametrize(("said", "most_s"), [("0.5", 0.5), ("90", 1.2), ("soon", 1.2)])
async def test_a_caller_may_say_how_long_it_waits(fleet: Site, said: str, most_s: float) -> None:
    headers = {"x-gateway-timeout-s": said}
    anew = (await asked(fleet, request=CHAT, headers=headers)).json()
    past = await sent(fleet, headers)
    again = (await asked(fleet, request_id=past)).json()

    assert anew["outlook"] == again["outlook"] == {"waiting": 0, "expected_wait_s": 0.0, "max_wait_s": most_s}


async def test_a_document_is_told_how_long_what_is_being_read_will_take(fleet: Site) -> None:
    """Although nobody else is waiting."""
    first, second = ([{"role": "user", "content": f"{word} " * 30_000}] for word in ("stone", "river"))
    await sent(fleet, messages=first)
    load, most = Load(long_unanswered=1, prefill_ms=40_000), Load(99, 10**6, 10**6, 99, 99, 10**6)
    slots = [await fleet.gateway.ledger.acquire(name, load, most) for name in ("light", "push")]

    outlook = (await asked(fleet, request={**CHAT, "messages": second})).json()["outlook"]
    for slot in slots:
        await fleet.gateway.ledger.release(slot)  # type: ignore[arg-type]

    assert outlook["waiting"] == 0
    assert 1 < outlook["expected_wait_s"] <= 40


async def heard(fleet: Site, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Return the refusal that a caller gets, in the words of `explain`."""
    async with fleet.http() as http:
        answer = await http.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)
    error = answer.json()["error"]
    return {"status": answer.status_code, "code": error["code"], "message": error["message"]}


async def test_who_would_be_refused_for_the_wait_is_told_what_it_would_hear(fleet: Site) -> None:
    """Two are being read for 40 s, and a class of documents waits 1.2 s."""
    first, second = ([{"role": "user", "content": f"{word} " * 30_000}] for word in ("stone", "river"))
    await sent(fleet, messages=first)
    load, most = Load(long_unanswered=1, prefill_ms=40_000), Load(99, 10**6, 10**6, 99, 99, 10**6)
    slots = [await fleet.gateway.ledger.acquire(name, load, most) for name in ("light", "push")]

    found = (await asked(fleet, request={**CHAT, "messages": second})).json()
    told = await run(
        "explain", "--live", fleet.admin_url, "-", stdin=json.dumps({**CHAT, "messages": second})
    )
    answer = await heard(fleet, {}, messages=second)
    for slot in slots:
        await fleet.gateway.ledger.release(slot)  # type: ignore[arg-type]

    assert answer["code"] == "wait_too_long"
    assert {**found["refused"], "message": ""} == {**answer, "message": ""}
    assert found["refused"]["message"].partition("about")[0] == answer["message"].partition("about")[0]
    assert told.exit_code == 1
    assert "refused: the gateway would answer 429 wait_too_long: " in told.output


@asynccontextmanager
async def held_for_a_large_one(tmp_path: Path) -> AsyncIterator[Site]:
    """Run a backend of whose knee a fifth is free, for which a request with 16 choices waits."""
    model = {
        "classes": [
            {
                "class": "wide",
                "when": {"header": {"x-wide": True}},
                "pools": ["light"],
                "waiting": {"max_wait_s": 60, "ttft_target_s": 600, "waiting_max": 1},
            },
            {"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 0.3, "ttft_target_s": 600}},
        ]
    }
    simulators = simulated({"light": "h100-tp1-light"})
    async with site(
        tmp_path, fleet=simulators, pools={"light": ["light"]}, models={"gemma-4": model}
    ) as fleet:
        load, most = Load(seqs=51, share=800_000), Load(99, 10**6, 10**6, 99, 99, 10**6)
        slot = await fleet.gateway.ledger.acquire("light", load, most)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sent, fleet, {"x-wide": "yes"}, n=16))
            await fleet.eventually(lambda: len(fleet.gateway.pipeline.room.line) == 1)
            yield fleet
            await fleet.gateway.ledger.release(slot)  # type: ignore[arg-type]


async def test_who_comes_behind_another_class_is_told_so(tmp_path: Path) -> None:
    """The backend has room for it, but is held for a larger one."""
    async with held_for_a_large_one(tmp_path) as fleet:
        found = (await asked(fleet, request=CHAT)).json()
        told = await run("explain", "--live", fleet.admin_url, "-", stdin=json.dumps(CHAT))
        answer = await heard(fleet, {})

    assert answer["code"] == "waited_too_long"
    assert candidate(found, "light")["excluded"] is None
    assert found["outlook"] == {"waiting": 1, "expected_wait_s": None, "max_wait_s": 0.3}
    assert "behind 1 waiting" in told.output


async def test_whose_class_has_no_place_left_in_the_queue_is_told_so(tmp_path: Path) -> None:
    """Although the backend has room for it."""
    headers = {"x-wide": "no"}
    async with held_for_a_large_one(tmp_path) as fleet:
        found = (await asked(fleet, request=CHAT, headers=headers)).json()
        answer = await heard(fleet, headers)

    assert answer["code"] == "queue_full"
    assert candidate(found, "light")["excluded"] is None
    assert found["refused"] == answer


PICTURE = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="}},
    ],
}


async def test_a_full_queue_keeps_nobody_from_a_backend_for_which_none_of_it_waits(tmp_path: Path) -> None:
    """Images run on one of two backends, which is full."""
    waiting = {"max_wait_s": 60, "ttft_target_s": 600, "waiting_max": 1}
    every = {"class": "every", "pools": ["light", "push"], "waiting": waiting}
    simulators = simulated({"light": "h100-tp1-light", "push": "h100-tp2-push"})
    pools, models = {"light": ["light"], "push": ["push"]}, {"gemma-4": {"classes": [every]}}
    async with site(tmp_path, fleet=simulators, pools=pools, models=models) as fleet:
        load, most = Load(seqs=64, share=10**6), Load(99, 10**6, 10**6, 99, 99, 10**6)
        slot = await fleet.gateway.ledger.acquire("light", load, most)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sent, fleet, messages=[PICTURE]))
            await fleet.eventually(lambda: len(fleet.gateway.pipeline.room.line) == 1)

            second = await heard(fleet, {}, messages=[PICTURE])
            found = (await asked(fleet, request=CHAT)).json()
            async with fleet.http() as http:
                answer = await http.post("/v1/chat/completions", json=CHAT)
            await fleet.gateway.ledger.release(slot)  # type: ignore[arg-type]

    assert second["code"] == "queue_full"
    assert found["refused"] is None
    assert (answer.status_code, answer.headers["x-gateway-backend"]) == (200, "push")


async def test_who_would_be_refused_for_want_of_a_backend_is_told_so(fleet: Site) -> None:
    for backend in fleet.backends.values():
        await backend.stop()
    await fleet.eventually(
        lambda: all(status.state.value != "up" for status in fleet.gateway.fleet.statuses().values())
    )
    found = (await asked(fleet, request=CHAT)).json()

    assert found["refused"] == await heard(fleet, {})
    assert found["refused"]["code"] == "no_backend"
    assert len(found["decision"]["candidates"]) == 2


async def test_who_would_be_tried_on_an_ejected_backend_is_told_so_and_so_is_its_operator(
    fleet: Site,
) -> None:
    fleet.gateway.fleet.hear("push", PeerVerdict("gw-2", Verdict(1, State.EJECTED, "3 failures", 60.0)))

    found = (await asked(fleet, request=CHAT, headers={"x-tier": "gold"})).json()
    said = await run(
        "explain", "--live", fleet.admin_url, "--header", "x-tier: gold", "-", stdin=json.dumps(CHAT)
    )
    await sent(fleet, {"x-tier": "gold"})
    async with clients.http(base_url=fleet.admin_url) as http:
        (record,) = (await http.get("/admin/requests")).json()

    why = "ejected: seen by gw-2: 3 failures; tried because no other takes this request"
    (candidate,) = found["decision"]["candidates"]
    assert (found["refused"], candidate["excluded"], candidate["detail"]) == (None, None, why)
    assert said.exit_code == 0 and "goes to push" in said.output
    assert (record["status"], record["placed"]["detail"]) == (200, why)


@pytest.mark.parametrize("caches", [True, False])
async def test_an_engine_holds_conversations_unless_it_says_that_it_caches_none(
    tmp_path: Path, caches: bool
) -> None:
    simulators = simulated({"light": "h100-tp1-light", "push": "h100-tp2-push"}, prefix_caching=caches)
    pools = {"light": ["light"], "push": ["push"]}
    async with site(tmp_path, fleet=simulators, pools=pools, models=MODELS) as fleet:
        await fleet.eventually(lambda: fleet.gateway.fleet.statuses()["light"].engine is not None)
        await sent(fleet)
        found = candidate((await asked(fleet, request=CHAT)).json(), "light")

    assert (found["scores"]["prefix_affinity"] > 0) is caches


async def test_an_engine_holds_what_conversations_share_once_two_have_parted(fleet: Site) -> None:
    """As the engine itself, which says so in its metrics (`tests/core/test_engine.py`)."""
    shared = {"role": "system", "content": "The manual of the ferry. " * 300}
    first, second, third = (
        [shared, {"role": "user", "content": text}] for text in ("Its length?", "Its captain?", "Its age?")
    )

    async def affinity(messages: object) -> float:
        found = (await asked(fleet, request={**CHAT, "messages": messages})).json()
        return float(candidate(found, "light")["scores"]["prefix_affinity"])

    await fleet.eventually(lambda: fleet.gateway.fleet.statuses()["light"].engine is not None)
    await sent(fleet, messages=first)
    once = await affinity(third), await affinity(first)
    await sent(fleet, messages=second)
    twice = await affinity(third), await affinity(first)

    assert once == (0.0, 1.0)
    assert twice[0] > 0.98
    assert twice[1] == 1.0


async def test_a_backend_that_has_gone_is_out(fleet: Site) -> None:
    await fleet.backends["light"].stop()
    await fleet.eventually(lambda: fleet.gateway.fleet.statuses()["light"].state.value != "up")
    found = (await asked(fleet, request=CHAT)).json()

    assert candidate(found, "light")["excluded"] == "unhealthy"
    assert found["decision"]["candidates"][0]["backend"] == "push"


async def test_another_policy_is_tried_and_nothing_changes(standing: Site) -> None:
    before = standing.gateway.policy
    pools = {"light": ["light", "new"], "push": ["push"]}
    backends = yaml.safe_load(standing.gateway.settings.source)["backends"]
    backends["new"] = {"url": "http://127.0.0.1:9", "profile": "h100-tp1-light"}
    found = (
        await asked(standing, request=CHAT, config=config(standing, pools=pools, backends=backends))
    ).json()

    assert candidate(found, "new")["excluded"] is None
    assert found["notes"] == ["Not in the running fleet, so assumed to be idle and healthy: new."]
    assert "backend new is new" in " ".join(found["changes"])
    assert found["policy"] != before.version
    assert standing.gateway.policy is before


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"x-tier": "gold"}, {}, "gold"),
        ({"x-tier": "silver"}, {}, "short_chat"),
        (None, {"reasoning_effort": "high"}, "thinking"),
        (None, {}, "short_chat"),
    ],
)
async def test_a_past_request_is_of_the_same_class_again(
    standing: Site, headers: dict[str, str] | None, fields: dict[str, Any], name: str
) -> None:
    request_id = await sent(standing, headers, **fields)
    found = (await asked(standing, request_id=request_id)).json()

    assert found["decision"]["traffic_class"] == name
    (record,) = [one for one in standing.gateway.journal.recent() if one.id == request_id]
    assert record.decision is not None
    assert found["decision"]["demand"]["prompt_tokens"] == record.decision.demand.prompt_tokens
    assert found["decision"]["demand"]["total_tokens"] == record.decision.demand.total_tokens


async def test_of_a_past_request_its_text_and_what_nobody_asked_for_are_not_kept(standing: Site) -> None:
    headers = {"x-tier": SECRET_TEXT, "x-other": SECRET_TEXT}
    request_id = await sent(standing, headers, messages=[{"role": "user", "content": SECRET_TEXT}])
    async with clients.http(base_url=standing.admin_url) as http:
        kept = (await http.get(f"/admin/request/{request_id}")).text
    models = {
        "gemma-4": {"classes": [{"class": "all", "when": {"header": {"x-other": True}}, "pools": ["push"]}]}
    }
    models["gemma-4"]["classes"].append({"class": "rest", "pools": ["light"]})
    found = (await asked(standing, request_id=request_id, config=config(standing, models=models))).json()

    assert json.loads(kept)["asked"]["headers"] == {"x-tier": True}  # it had one, of another value
    assert SECRET_TEXT not in kept
    assert found["decision"]["traffic_class"] == "rest"
    assert "Headers that the policy in force has no conditions on are not kept: x-other." in found["notes"]


async def test_a_response_is_explained_as_its_chat(standing: Site) -> None:
    response = {"model": "gemma-4", "input": "Why is the sky blue?", "previous_response_id": "resp_1"}
    found, chat = (
        (await asked(standing, request=response)).json(),
        (await asked(standing, request=CHAT)).json(),
    )

    assert found["decision"] == chat["decision"]
    (note,) = found["notes"]
    assert "They are not counted here" in note


@pytest.mark.parametrize("live", [True, False])
async def test_a_body_with_a_prompt_is_explained_as_a_completion(
    standing: Site, tmp_path: Path, live: bool
) -> None:
    ids = 150_000  # more values than any other endpoint takes
    body = json.dumps({"model": "gemma-4", "prompt": list(range(ids)), "max_tokens": 5})
    (tmp_path / "gateway.yaml").write_text(config(standing), "utf-8")
    where = ["--live", standing.admin_url] if live else ["--config", str(tmp_path / "gateway.yaml")]
    said = await run("explain", *where, "--json", "-", stdin=body)

    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["decision"]["estimate"]["tokens"] >= ids


async def test_what_would_be_refused_is_an_answer(standing: Site) -> None:
    found = await asked(standing, request={**CHAT, "model": "gpt-5"})
    assert found.status_code == 200
    assert found.json()["refused"] == {
        "status": 404,
        "code": "model_not_found",
        "message": "The model `gpt-5` does not exist. Known: gemma-4.",
    }


@pytest.mark.parametrize(
    ("question", "status", "says"),
    [
        ({}, 400, "Give either"),
        ({"request": CHAT, "request_id": "req-1"}, 400, "Give either"),
        ({"request_id": "req-none"}, 404, "not kept"),
        ({"request": CHAT, "model": "x"}, 400, "unknown field"),
        ({"request": CHAT, "headers": {"a": 1}}, 400, "Expected `str`"),
        ({"request": CHAT, "config": "pools: {"}, 400, "gateway.yaml:1"),
        ({"request": CHAT, "config": "x" * 1_000_001}, 400, "longer than 1000000"),
    ],
)
async def test_a_question_that_makes_no_sense_is_answered_so(
    standing: Site, question: dict[str, Any], status: int, says: str
) -> None:
    found = await asked(standing, **question)
    assert found.status_code == status
    assert says in found.json()["error"]["message"]


# ------------------------------------------------------------------ the command


async def run(*arguments: str, stdin: str = json.dumps(CHAT)) -> Result:
    """Run the command in a thread: what it asks is served by this one."""
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, arguments, input=stdin))


async def test_the_command_asks_a_running_gateway(fleet: Site) -> None:
    said = await run("explain", "--live", fleet.admin_url, "-")
    as_json = await run("explain", "--live", f"{fleet.admin_url}/", "--json", "--header", "X-Tier: gold", "-")

    assert said.exit_code == 0, said.output
    assert "goes to light (pool light)" in said.output
    found = json.loads(as_json.stdout)
    assert found["decision"]["traffic_class"] == "gold"
    assert found["fleet"] == "live"


async def test_the_command_says_what_a_request_would_wait_for(fleet: Site) -> None:
    everything = Load(seqs=999, share=10**6)
    limits = Load(*[10**9] * 6)
    slots = [await fleet.gateway.ledger.acquire(name, everything, limits) for name in ("light", "push")]
    said = await run("explain", "--live", fleet.admin_url, "-")
    for slot in slots:
        assert isinstance(slot, Slot)
        await fleet.gateway.ledger.release(slot)

    assert said.exit_code == 0, said.output
    assert re.search(r"waits for (light or push|push or light), for up to 1\.2 s", said.output)


async def test_the_command_tries_a_file_only_where_it_is_named(fleet: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(config(fleet, models={"gemma-4": {"classes": [{"class": "all", "pools": ["push"]}]}}))
    named = await run("explain", "--live", fleet.admin_url, "--config", str(other), "-")
    runner = CliRunner(env={"GEMMA_GATEWAY_CONFIG": str(other)})
    arguments = ["explain", "--live", fleet.admin_url, "-"]
    unnamed = await anyio.to_thread.run_sync(lambda: runner.invoke(main, arguments, input=json.dumps(CHAT)))

    assert "goes to push (pool push)" in named.output
    assert "class short_chat is gone" in named.output
    assert "goes to light (pool light)" in unnamed.output


async def test_names_and_lists_are_no_markup(standing: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    classes = [
        {"class": "gold", "when": {"header": {"x-tier": "[/x] gold"}}, "pools": ["light"]},
        {"class": "short_chat", "pools": ["push", "light"]},
    ]
    models = {"gemma-4": {"aliases": ["/models/gemma-4"], "classes": classes}}
    other.write_text(config(standing, models=models))
    found = await run("explain", "--live", standing.admin_url, "--config", str(other), "-")

    assert found.exit_code == 0, found.output
    assert "[/x] gold" in found.output
    assert "[light, push] -> [push, light]" in found.output.replace("\n", " ")


async def test_errors_in_a_tried_file_name_that_file(standing: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(config(standing).replace("pools:", "pool:"))
    found = await run("explain", "--live", standing.admin_url, "--config", str(other), "-")

    assert found.exit_code == 1
    assert f"/admin/explain: {other}:" in found.output
    assert "gateway.yaml" not in found.output


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        ("{", "the gateway would answer 400 invalid_json"),
        (json.dumps({**CHAT, "model": "gpt-5"}), "the gateway would answer 404 model_not_found"),
    ],
)
async def test_the_command_says_what_would_be_refused(standing: Site, stdin: str, says: str) -> None:
    found = await run("explain", "--live", standing.admin_url, "-", stdin=stdin)
    assert found.exit_code == 1
    assert says in found.output


async def test_the_command_says_when_nobody_answers(standing: Site) -> None:
    nobody = await run("explain", "--live", "http://127.0.0.1:9", "-")
    another = await run("explain", "--live", standing.url, "-")
    assert (nobody.exit_code, another.exit_code) == (1, 1)
    assert "http://127.0.0.1:9/admin/explain: " in nobody.output
    assert "This is the port for applications" in another.output


async def test_the_command_says_what_a_proxy_answered() -> None:
    """One that asks for a password answers with a page."""
    page = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 3\r\nconnection: close\r\n\r\n<p>"
    async with raw_server(always(page)) as proxy:
        found = await run("explain", "--live", proxy.url, "-")
    assert found.exit_code == 1
    assert "/admin/explain: not the answer of a gateway (status 401)" in found.output
