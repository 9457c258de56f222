"""A gateway writes down what it decides about real traffic, and other policies are tried on that."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from support.decisions import moves
from support.site import FLEET, POLICY, Site, simulated, site

from gateway import settings
from gateway.replay import reading
from gateway.replay.comparing import compare
from gateway.settings import Settings

SECRET = "xyzzyquux"
DOCUMENTS = (6_000, 9_000, 20_000)
"""About how many tokens they have."""
TWO_PLACES = {"limits": {"knee_seqs": 2}}
PATIENT = {"max_wait_s": 120}


def policy(*, threshold: int = 16_000, light: tuple[str, ...] = ("light-0", "light-1")) -> dict[str, Any]:
    """Return the sections of a site whose chats and documents never share a pool."""
    return {
        "pools": {"light": list(light), "push": ["push"], "reasoning": ["tpu", "spark"]},
        "models": {
            "gemma-4": {
                "classes": [
                    {
                        "class": "team",
                        "when": {"header": {"x-team": "red"}},
                        "pools": ["reasoning"],
                        "waiting": PATIENT,
                    },
                    {
                        "class": "long_document",
                        "when": {"prompt_tokens": f">= {threshold}"},
                        "pools": ["push"],
                        "waiting": {"max_wait_s": 900},
                    },
                    {"class": "short_chat", "pools": ["light"], "waiting": PATIENT},
                ]
            }
        },
    }


async def recorded(folder: Path) -> Path:
    """Return the log of a gateway that has served some of everything."""
    decisions = {"file": "decisions.jsonl"}
    async with site(folder, backend=TWO_PLACES, decisions=decisions, **policy()) as gateway:
        await traffic(gateway)
    return folder / "decisions.jsonl"


async def traffic(gateway: Site) -> None:
    client = gateway.openai(timeout=120)

    async def ask(tokens: int, *, stream: bool, headers: Mapping[str, str]) -> None:
        content = f"{SECRET} " + "The river runs past the old mill. " * (tokens // 8)
        answer: Any = await client.chat.completions.create(
            model="gemma-4",
            messages=[{"role": "user", "content": content}],
            max_tokens=100,
            stream=stream,
            user=SECRET,
            extra_headers=headers,
        )
        if stream:
            async for _ in answer:
                pass

    async with anyio.create_task_group() as tasks:
        for number in range(16):
            headers = {"x-team": "red"} if number == 3 else {"x-team": SECRET, "x-user": SECRET}
            tasks.start_soon(lambda n, h: ask(100, stream=bool(n % 4), headers=h), number, headers)
        for tokens in DOCUMENTS:
            tasks.start_soon(lambda t: ask(t, stream=True, headers={}), tokens)
    async with gateway.http() as http:
        unknown = await http.post("/v1/chat/completions", json={"model": SECRET, "messages": []})
        assert unknown.status_code in {400, 404}
        long = "river " * 300_000
        body = {"model": "gemma-4", "messages": [{"role": "user", "content": long}], "max_tokens": 9}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


def tried(folder: Path, names: Mapping[str, str] = FLEET, **sections: Any) -> Settings:
    path = folder / "tried.yaml"
    backends = {
        name: {"url": f"http://127.0.0.1:{port}", "profile": profile, **TWO_PLACES}
        for port, (name, profile) in enumerate(names.items(), 1)
    }
    path.write_text(yaml.safe_dump({**POLICY, "backends": backends, **sections}))
    return settings.load(path, {})


async def test_what_was_served_is_written_down_and_tried_under_other_policies(tmp_path: Path) -> None:
    file = await recorded(tmp_path)

    assert "decisions" not in {thread.name for thread in threading.enumerate()}  # all is written
    raw = file.read_bytes()
    assert SECRET.encode() not in raw  # neither prompt nor user, model nor header value
    assert b"river" not in raw
    assert b"127.0.0.1" not in raw
    log = reading.read([file])
    assert log.broken == []
    assert len(log.entries) == 16 + len(DOCUMENTS) + 2
    assert sorted(entry.past.traffic_class for entry in log.entries) == sorted(
        ["", "team", *["short_chat"] * 15, *["long_document"] * 2]
        + ["short_chat"] * 2  # documents below the threshold
    )

    same = compare(log, tried(tmp_path, **policy()))
    assert (same.moved, moves(same), same.accepted) == (0, {}, 0)
    assert same.simulated == same.predicted
    assert same.undecided == {"rejected": 1}
    [refusal] = same.refusals  # as it was
    assert (refusal.code, refusal.requests, refusal.new) == ("context_length_exceeded", 1, 0)
    assert same.same_pool_share == 1
    assert sum(same.recorded.served.values()) == 16 + len(DOCUMENTS)
    assert same.notes == [
        "15 requests had a value in header x-team that no recorded condition named: the other policy is "
        "assumed not to name it either"
    ]

    documents = sorted(one.past.prompt.tokens for one in log.entries if one.past.prompt)[-4:-2]
    assert 1_000 < documents[0] < documents[1] < 16_000
    for threshold, moved in ((documents[1], 1), (documents[0] + 1, 1), (documents[0], 2)):
        lower = compare(log, tried(tmp_path, **policy(threshold=threshold)))
        assert lower.moved == moved
        assert moves(lower)["class"] == {("short_chat", "long_document"): moved}
        assert moves(lower)["pool"] == {("light", "push"): moved}

    fleet = {name: profile for name, profile in FLEET.items() if name != "light-1"}
    half = compare(log, tried(tmp_path, fleet, **policy(light=("light-0",))))
    assert half.simulated is not None
    before, after = half.simulated.classes["short_chat"], half.predicted.classes["short_chat"]
    assert before.wait_p95_s is not None
    assert after.wait_p95_s is not None
    assert after.wait_p95_s > 1.5 * before.wait_p95_s > 0
    assert half.moved == 0
    assert any(
        "recorded with 5 backends, the other policy has 4: without light-1" in note for note in half.notes
    )


async def test_a_policy_that_comes_into_force_is_written_before_what_is_decided_under_it(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, decisions={"file": "decisions.jsonl"}) as gateway:
        client = gateway.openai()

        async def ask(text: str) -> None:
            message: Any = {"role": "user", "content": text}
            await client.chat.completions.create(model="gemma-4", messages=[message], max_tokens=5)

        await ask("Hello")
        document = yaml.safe_load((tmp_path / "gateway.yaml").read_text())
        document["pools"]["light"] = ["light-1", "light-0"]
        first = gateway.gateway.policy.version
        async with gateway.http() as http:
            answer = await http.put(
                f"{gateway.admin_url}/admin/config",
                content=yaml.safe_dump(document),
                headers={"if-match": "*"},
            )
            assert answer.status_code == 200
        second = gateway.gateway.policy.version
        await ask("Another conversation")

    log = reading.read([tmp_path / "decisions.jsonl"])
    assert [entry.past.policy for entry in log.entries] == [first, second]
    assert [entry.past.backend for entry in log.entries] == ["light-0", "light-1"]
    assert log.policies[second].policy.pools["light"].backends == ("light-1", "light-0")


async def test_who_waited_while_the_policy_changed_is_written_under_the_one_that_placed_it(
    tmp_path: Path,
) -> None:
    narrow: dict[str, Any] = {
        "fleet": simulated({name: FLEET[name] for name in ("light-0", "push")}, speed=1.0),
        "backend": {"limits": {"knee_seqs": 1}},
        "pools": {"light": ["light-0"], "push": ["push"]},
    }
    chats: dict[str, Any] = {"class": "short_chat", "pools": ["light"], "waiting": PATIENT}
    models = {"gemma-4": {"classes": [chats]}}
    decisions = {"file": "decisions.jsonl"}
    async with site(tmp_path, models=models, decisions=decisions, **narrow) as gateway:
        client = gateway.openai()

        async def ask(tokens: int) -> None:
            message: Any = {"role": "user", "content": "Hello"}
            extra = {"min_tokens": tokens}
            await client.chat.completions.create(
                model="gemma-4", messages=[message], max_tokens=tokens, extra_body=extra
            )

        async def hold(place: anyio.CancelScope) -> None:
            with place:
                await ask(20_000)

        first = gateway.gateway.policy.version
        async with anyio.create_task_group() as tasks:
            place = anyio.CancelScope()
            tasks.start_soon(hold, place)
            await gateway.eventually(lambda: bool(gateway.gateway.ledger.load("light-0").seqs))
            tasks.start_soon(ask, 5)
            await gateway.eventually(lambda: len(gateway.gateway.pipeline.room.line) == 1)
            document = yaml.safe_load((tmp_path / "gateway.yaml").read_text())
            document["models"] = {"gemma-4": {"classes": [{**chats, "class": "chat"}]}}
            async with gateway.http() as http:
                url = f"{gateway.admin_url}/admin/config"
                await http.put(url, content=yaml.safe_dump(document), headers={"if-match": "*"})
            second = gateway.gateway.policy.version
            assert second != first
            place.cancel()

    log = reading.read([tmp_path / "decisions.jsonl"])
    found = {(entry.past.policy, entry.past.traffic_class) for entry in log.entries}
    assert found == {(first, "short_chat"), (second, "chat")}


@pytest.mark.parametrize("key_names", [True, False])
async def test_the_name_of_a_key_is_written_if_it_may_and_never_the_key(
    tmp_path: Path, key_names: bool
) -> None:
    of_a = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of "a"
    decisions = {"file": "decisions.jsonl", "key_names": key_names}
    async with site(tmp_path, keys={"nightly": {"sha256": of_a}}, decisions=decisions) as gateway:
        await gateway.openai(api_key="a").chat.completions.create(
            model="gemma-4", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )

    [entry] = reading.read([tmp_path / "decisions.jsonl"]).entries
    assert entry.past.key == ("nightly" if key_names else None)
    assert of_a.encode() not in (tmp_path / "decisions.jsonl").read_bytes()
