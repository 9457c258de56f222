"""The Responses API through the unmodified SDK, over real sockets, before a simulated fleet."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai.types.responses import ParsedResponse, Response
from pydantic import BaseModel
from support import clients
from support.redis_server import own_server
from support.site import Site, simulated, site

from gateway.simulator import Fault, FaultOrder

SKY = "Why is the sky blue?"
ONE_POOL: dict[str, Any] = {
    "pools": {"light": ["light-0"]},
    "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, fleet=simulated({"light-0": "h100-tp1-light"}), **ONE_POOL) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A gateway for all who only ask, and of whose answer nothing depends on who asked before."""
    folder, lasting = tmp_path_factory.mktemp("standing"), {**ONE_POOL, "health": {"interval_s": 5}}
    async with site(folder, fleet=simulated({"light-0": "h100-tp1-light"}), **lasting) as running:
        yield running
        await running.eventually(running.idle)


def digest(text: str) -> dict[str, Any]:
    return {"sha256": sha256(text.encode()).hexdigest()}


# ---------------------------------------------------------------- whole


async def test_a_response_says_what_the_chat_would_have(fleet: Site) -> None:
    raw = await fleet.openai().responses.with_raw_response.create(
        model="gemma-4",
        input=SKY,
        instructions="Be brief.",
        max_output_tokens=20,
        temperature=0.5,
        metadata={"ticket": "7"},
    )
    chat = await fleet.openai().chat.completions.create(
        model="gemma-4",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": SKY}],
        max_tokens=20,
    )

    answer = raw.parse()
    assert raw.http_response.status_code == 200
    assert raw.headers["x-gateway-class"] == "short_chat"
    assert raw.headers["x-request-id"].startswith("req-")
    assert answer.id.startswith("resp_")
    assert answer.model == "gemma-4"
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.temperature, answer.metadata) == ("Be brief.", 0.5, {"ticket": "7"})
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 20
    record = fleet.gateway.journal.recent()[1]
    assert record.id == raw.headers["x-request-id"]
    assert record.ending.value == "completed"


async def test_reasoning_is_an_item_of_its_own_and_routes(fleet: Site) -> None:
    raw = await fleet.openai().responses.with_raw_response.create(
        model="gemma-4", input=SKY, reasoning={"effort": "high"}
    )

    answer = raw.parse()
    assert raw.headers["x-gateway-class"] == "reasoning"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    thought: Any = answer.output[0]
    assert thought.content[0].type == "reasoning_text"
    assert thought.content[0].text
    assert answer.status == "completed"
    assert answer.completed_at is not None
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


class Verdict(BaseModel):
    sentence: str
    score: int


async def test_structured_output_is_parsed(fleet: Site) -> None:
    answer: ParsedResponse[Verdict] = await fleet.openai().responses.parse(
        model="gemma-4", input="Judge this.", text_format=Verdict
    )

    assert isinstance(answer.output_parsed, Verdict)


@pytest.mark.parametrize(
    ("tool", "namespace"),
    [
        (WEATHER, None),
        ({"type": "namespace", "name": "mcp", "description": "Outdoors.", "tools": [WEATHER]}, "mcp"),
    ],
    ids=["plain", "in-a-namespace"],
)
async def test_a_function_is_called_and_its_result_taken(
    fleet: Site, tool: Any, namespace: str | None
) -> None:
    client = fleet.openai()
    first = await client.responses.create(
        model="gemma-4", input="Call get_weather for Paris.", tools=[tool], tool_choice="required"
    )
    call: Any = first.output[-1]
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert call.namespace == namespace
    assert isinstance(json.loads(call.arguments), dict)

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    by_id = await client.responses.create(
        model="gemma-4", previous_response_id=first.id, input=[result], tools=[tool]
    )
    conversation: Any = [{"role": "user", "content": "Call get_weather for Paris."}, *first.output, result]
    by_hand = await client.responses.create(model="gemma-4", input=conversation, tools=[tool], store=False)

    assert by_id.output_text
    assert by_id.output_text == by_hand.output_text
    assert by_id.usage is not None
    assert by_hand.usage is not None
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens


async def test_what_vllm_adds_to_a_chat_may_be_sent_too(fleet: Site) -> None:
    answer = await fleet.openai().responses.create(
        model="gemma-4", input=SKY, max_output_tokens=300, extra_body={"ignore_eos": True, "n": 3}
    )

    assert answer.usage is not None
    assert answer.usage.output_tokens == 300


# ---------------------------------------------------------------- streamed


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 40},
        {"reasoning": {"effort": "low"}},
        {"input": "Call get_weather for Paris.", "tools": [WEATHER], "tool_choice": "required"},
    ],
    ids=["text", "reasoning", "call"],
)
async def test_a_stream_ends_as_the_response_it_would_have_been(fleet: Site, fields: dict[str, Any]) -> None:
    client = fleet.openai()
    fields = {"model": "gemma-4", "input": SKY, **fields}
    whole = await client.responses.create(**fields)
    events = [event async for event in await client.responses.create(**fields, stream=True)]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}"
    assert _without_ids(last) == _without_ids(whole)
    assert len([event for event in events if event.type.endswith(".delta")]) > 0
    assert (await client.responses.retrieve(last.id)).to_dict() == last.to_dict()


def _without_ids(response: Response) -> dict[str, Any]:
    shown = response.to_dict()
    for item in shown["output"]:  # type: ignore[attr-defined]
        assert item.pop("id")
        item.pop("call_id", None)
    return {name: value for name, value in shown.items() if name not in ("id", "created_at", "completed_at")}


async def test_the_sdks_stream_helper_follows(fleet: Site) -> None:
    async with fleet.openai().responses.stream(model="gemma-4", input=SKY) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()

    assert "".join(deltas) == final.output_text != ""


async def test_a_stream_that_breaks_is_a_response_that_failed(one: Site) -> None:
    one.backends["light-0"].order(FaultOrder(Fault.DIE_MID_STREAM, after_chunks=5))
    client = one.openai()

    stream = await client.responses.create(
        model="gemma-4",
        input=SKY,
        max_output_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    events: list[Any] = []
    with pytest.raises(openai.APIError, match="The connection to the backend broke") as caught:
        async for event in stream:
            events.append(event)

    assert caught.value.code == caught.value.type == "server_error"
    assert events[-1].type == "response.output_text.delta"
    assert one.gateway.journal.recent()[0].error_code == "stream_broken"
    failed: Any = await client.responses.retrieve(events[0].response.id)
    assert failed.status == "failed"
    assert failed.error.code == "server_error"
    assert failed.output[0].status == "incomplete"


async def test_a_caller_that_leaves_stops_the_work_and_nothing_is_kept(one: Site) -> None:
    client = one.openai()
    stream = await client.responses.create(
        model="gemma-4",
        input=SKY,
        max_output_tokens=20_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    created = await anext(aiter(stream))
    assert created.type == "response.created"
    await stream.close()

    await one.eventually(one.idle)
    await one.eventually(lambda: one.backends["light-0"].host.engine.running == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(created.response.id)


async def test_a_stream_that_waits_gets_comments_before_its_events(tmp_path: Path) -> None:
    waiting = {"keep_alive_after_s": 0.1}
    models = {"gemma-4": {"classes": [{"class": "chat", "pools": ["light"], "waiting": waiting}]}}
    slow = simulated({"light-0": "h100-tp1-light"}, speed=2.0)
    long = "The river runs past the old mill. " * 3_000
    async with site(tmp_path, fleet=slow, **(ONE_POOL | {"models": models})) as running:
        fields: Any = {"model": "gemma-4", "input": long, "max_output_tokens": 5, "stream": True}
        async with (
            running.http() as client,
            client.stream("POST", "/v1/responses", json=fields) as answer,
        ):
            assert answer.status_code == 200
            body = b"".join([part async for part in answer.aiter_bytes()])
        events = [event async for event in await running.openai().responses.create(**fields)]
        await running.eventually(running.idle)

    assert b": keep-alive\n\n" in body
    assert body.startswith(b"event: response.created\ndata: {")
    assert b"[DONE]" not in body
    assert events[-1].type == "response.incomplete"


async def test_failing_over_goes_unnoticed(fleet: Site) -> None:
    fleet.backends["light-0"].order(FaultOrder(Fault.ERROR, for_s=1_000))

    for stream in (False, True, False, True):
        answer: Any = await fleet.openai().responses.create(model="gemma-4", input=SKY, stream=stream)
        events = [event async for event in answer] if stream else []
        assert (events[-1].response if stream else answer).status == "completed"


# ---------------------------------------------------------------- kept


async def test_a_conversation_goes_on_from_what_is_kept(fleet: Site) -> None:
    client = fleet.openai()
    first = await client.responses.create(model="gemma-4", input=SKY, instructions="Be brief.")
    second = await client.responses.create(
        model="gemma-4", previous_response_id=first.id, input="And at night?"
    )
    by_hand = await client.responses.create(
        model="gemma-4",
        input=[
            {"role": "user", "content": SKY},
            *first.output,  # type: ignore[list-item]
            {"role": "user", "content": "And at night?"},
        ],
    )
    listed: list[Any] = [
        item async for item in client.responses.input_items.list(second.id, limit=1, order="asc")
    ]

    assert second.previous_response_id == first.id
    assert second.output_text == by_hand.output_text
    texts = [item.content[0].text for item in listed]
    assert texts == [SKY, first.output_text, "And at night?"]
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.data == listed[2:]
    deleted = await client.responses.with_raw_response.delete(first.id)
    assert deleted.http_response.json() == {"id": first.id, "object": "response", "deleted": True}
    third = await client.responses.create(model="gemma-4", previous_response_id=second.id, input="Why?")
    assert third.output_text
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as gone:
            await call(first.id)
        assert gone.value.code == "response_not_found"


async def test_an_item_may_be_referred_to(fleet: Site) -> None:
    client = fleet.openai()
    first = await client.responses.create(model="gemma-4", input=SKY)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    question: Any = {"role": "user", "content": "Go on."}

    by_reference = await client.responses.create(model="gemma-4", input=[reference, question])
    item: Any = first.output[0]
    by_value = await client.responses.create(model="gemma-4", input=[item, question])
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.responses.create(
            model="gemma-4", input=[{"type": "item_reference", "id": "msg_1"}, question]
        )

    assert by_reference.output_text == by_value.output_text
    assert (unknown.value.code, unknown.value.param) == ("item_not_found", "input.0.id")


async def test_what_a_request_refers_to_counts_as_its_body(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"requests": {"max_body_bytes": 20_000}}
    async with site(
        tmp_path, fleet=simulated({"light-0": "h100-tp1-light"}), **ONE_POOL, **limits
    ) as running:
        client = running.openai()
        first = await client.responses.create(model="gemma-4", input="river " * 1_000, max_output_tokens=5)
        (asked,) = (await client.responses.input_items.list(first.id)).data
        reference: Any = {"type": "item_reference", "id": asked.id}

        async def go_on(references: int, previous: str | None = None) -> None:
            await client.responses.create(
                model="gemma-4", input=[reference] * references, previous_response_id=previous
            )

        await go_on(3)
        await go_on(1, previous=first.id)
        for references, previous in ((4, None), (3, first.id)):
            with pytest.raises(openai.APIStatusError) as refused:
                await go_on(references, previous)
            assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")


async def test_what_is_not_to_be_stored_is_not(fleet: Site) -> None:
    client = fleet.openai()
    answer = await client.responses.create(model="gemma-4", input=SKY, store=False)

    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as lost:
        await client.responses.create(model="gemma-4", previous_response_id=answer.id, input="?")
    assert lost.value.param == "previous_response_id"


async def test_what_is_too_large_to_keep_says_so(tmp_path: Path) -> None:
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        **ONE_POOL,
        responses={"max_bytes_per_key": 3_000},
    ) as running:
        client = running.openai()
        kept = await client.responses.create(model="gemma-4", input=SKY, max_output_tokens=5)
        long = await client.responses.create(model="gemma-4", input="river " * 600, max_output_tokens=5)
        events = [
            event
            async for event in await client.responses.create(
                model="gemma-4", input="river " * 600, max_output_tokens=5, stream=True
            )
        ]

    assert kept.to_dict()["store"] is True
    assert long.to_dict()["store"] is False
    assert events[-1].response.to_dict()["store"] is False  # type: ignore[union-attr]


async def test_an_operator_may_have_nothing_kept(tmp_path: Path) -> None:
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        **ONE_POOL,
        responses={"max_bytes_per_key": 0},
    ) as running:
        client = running.openai()
        answer = await client.responses.create(model="gemma-4", input=SKY, max_output_tokens=5)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)

    assert answer.to_dict()["store"] is False


async def test_each_key_has_its_own(tmp_path: Path) -> None:
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        **ONE_POOL,
        keys={"team-a": digest("a"), "team-b": digest("b")},
    ) as running:
        answer = await running.openai(api_key="a").responses.create(model="gemma-4", input=SKY)
        other = running.openai(api_key="b").responses
        refused: list[Callable[[], Awaitable[Any]]] = [
            lambda: other.retrieve(answer.id),
            lambda: other.delete(answer.id),
            lambda: other.input_items.list(answer.id).__aiter__().__anext__(),
            lambda: other.create(model="gemma-4", input="?", previous_response_id=answer.id),
        ]
        for call in refused:
            with pytest.raises(openai.NotFoundError) as caught:
                await call()
            assert caught.value.code == "response_not_found"
        reference: Any = {"type": "item_reference", "id": answer.output[0].id}
        with pytest.raises(openai.BadRequestError) as unknown:
            await other.create(model="gemma-4", input=[reference])
        stranger = running.openai(api_key="?").responses
        with pytest.raises(openai.AuthenticationError):
            await stranger.create(model="gemma-4", input=SKY)
        with pytest.raises(openai.AuthenticationError):
            await stranger.retrieve(answer.id)

        assert unknown.value.code == "item_not_found"
        assert (await running.openai(api_key="a").responses.retrieve(answer.id)).id == answer.id


async def test_through_a_store_every_gateway_finds_it_and_losing_it_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    fleet = {"fleet": simulated({"light-0": "h100-tp1-light"}), **ONE_POOL}
    with own_server("valkey-9", tmp_path) as server:
        async with (
            site(tmp_path / "one", **fleet, store=server.url) as first,
            site(tmp_path / "two", **fleet, store=server.url) as second,
        ):
            answer = await first.openai().responses.create(model="gemma-4", input=SKY)
            found = await second.openai().responses.retrieve(answer.id)
            assert found.to_dict() == answer.to_dict()

            server.kill()
            alone = await first.openai().responses.create(model="gemma-4", input=SKY)
            assert alone.output_text
            assert alone.to_dict()["store"] is False
            with pytest.raises(openai.InternalServerError) as away:
                await first.openai().responses.retrieve(answer.id)
            assert away.value.code == "store_unavailable"
            assert away.value.response.headers["retry-after"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found", "model"),
        ({"input": []}, openai.BadRequestError, "invalid_request", "input"),
        ({"background": True}, openai.BadRequestError, "background_not_supported", "background"),
        ({"input": "river " * 400_000}, openai.BadRequestError, "context_length_exceeded", "input"),
        ({"instructions": "river " * 1_400_000}, openai.APIStatusError, "request_too_large", None),
        ({"temperature": -3}, openai.BadRequestError, "invalid_request", "temperature"),  # the backend's word
        ({"max_output_tokens": 0}, openai.BadRequestError, "invalid_request", "max_output_tokens"),
        (
            {"input": [{"type": "item_reference", "id": f"msg_{number:032x}0000"} for number in range(65)]},
            openai.BadRequestError,
            "too_many_items",
            "input",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "tools.0.type",
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"}],
                    }
                ]
            },
            openai.BadRequestError,
            "remote_media_not_allowed",
            "input",
        ),
    ],
)
async def test_errors_arrive_as_the_sdks_own_exceptions(
    standing: Site, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            await standing.openai().responses.create(
                **{"model": "gemma-4", "input": SKY, "stream": stream, **fields}
            )

        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/responses", None, 405, "method_not_allowed"),
        ("GET", "/v1/responses/resp_1", None, 404, "response_not_found"),
        ("GET", "/v1/responses/resp_1/input_items", None, 404, "response_not_found"),
        ("GET", "/v1/responses/resp_1?stream=true", None, 404, "response_not_found"),
        ("DELETE", "/v1/responses/resp_1", None, 404, "response_not_found"),
        ("PUT", "/v1/responses/resp_1", None, 405, "method_not_allowed"),
        ("POST", "/v1/responses", b"{", 400, "invalid_json"),
        ("POST", "/v1/responses", b"[1]", 400, "invalid_request"),
        ("POST", "/v1/responses", b'{"model": "gemma-4", "input": ' + b"[" * 100_000, 400, "invalid_json"),
    ],
)
async def test_every_error_has_the_one_shape(
    standing: Site, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    async with standing.http() as client:
        answer = await client.request(method, path, content=body)

    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"]


async def test_one_in_place_is_not_streamed_again(standing: Site) -> None:
    client = standing.openai()
    answer = await client.responses.create(model="gemma-4", input=SKY, max_output_tokens=3)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.retrieve(answer.id, stream=True)

    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "stream")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", f"limit={'9' * 5000}", "order=up", "after=msg_1"]
)
async def test_a_page_that_cannot_be_is_refused(standing: Site, query: str) -> None:
    answer = await standing.openai().responses.create(model="gemma-4", input=SKY, max_output_tokens=3)
    async with standing.http() as client:
        page = await client.get(f"/v1/responses/{answer.id}/input_items?{query}")

    assert page.status_code == 400
    assert page.json()["error"]["param"] == query.partition("=")[0]


async def test_odd_numbers_and_characters_reach_the_backend(standing: Site) -> None:
    huge = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**40}}}
    fields = {
        "model": "gemma-4",
        "input": "half an emoji: \ud83d",
        "tools": [{**WEATHER, "parameters": huge}],
    }
    async with standing.http() as client:
        answer = await client.post("/v1/responses", content=json.dumps(fields))

    assert answer.status_code == 200
    kept = answer.json()
    assert kept["tools"][0]["parameters"] == huge
    async with standing.http() as client:
        assert (await client.get(f"/v1/responses/{kept['id']}")).json() == kept


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_is_nested_too_deeply_to_be_repeated_is_refused_at_once(one: Site, stream: bool) -> None:
    statuses = set()
    async with one.http() as client:
        for depth in (*range(500, 1_000, 20), 50_000):
            schema = '{"a":' * depth + "1" + "}" * depth
            tool = f'{{"type":"function","name":"f","parameters":{schema}}}'
            fields = f'"model":"gemma-4","input":"Hi","max_output_tokens":1,"stream":{json.dumps(stream)}'
            answer = await client.post("/v1/responses", content=f'{{{fields},"tools":[{tool}]}}')
            statuses.add(answer.status_code)
            if answer.status_code == 200:
                assert '"status":"incomplete"' in answer.text

    assert statuses == {200, 400}
    assert {record.ending.value for record in one.gateway.journal.recent()} == {"completed", "rejected"}


async def test_draining_finishes_streams_and_refuses_new_work(one: Site) -> None:
    stream = await one.openai().responses.create(
        model="gemma-4", input=SKY, max_output_tokens=1_000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.gateway.applications.serving.drain)
        await anyio.lowlevel.checkpoint()
        with pytest.raises(openai.InternalServerError) as caught:
            await one.openai().responses.create(model="gemma-4", input=SKY)
        events = [event async for event in stream]

    assert caught.value.code == "draining"
    assert events[-1].type == "response.incomplete"


async def test_a_picture_goes_where_pictures_are_taken(fleet: Site) -> None:
    pixel = base64.b64encode(bytes.fromhex("89504e470d0a1a0a")).decode()
    content: Any = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{pixel}", "detail": "auto"},
    ]
    with_picture = await fleet.openai().responses.create(
        model="gemma-4", input=[{"role": "user", "content": content}], max_output_tokens=5
    )
    without = await fleet.openai().responses.create(
        model="gemma-4", input=[{"role": "user", "content": content[:1]}], max_output_tokens=5
    )

    assert with_picture.usage is not None
    assert without.usage is not None
    assert with_picture.usage.input_tokens > without.usage.input_tokens + 100


async def test_a_tool_may_answer_with_a_picture(fleet: Site) -> None:
    client = fleet.openai()
    first = await client.responses.create(
        model="gemma-4", input="Call get_weather for Paris.", tools=[WEATHER], tool_choice="required"
    )
    call: Any = first.output[-1]
    pixel = base64.b64encode(bytes.fromhex("89504e470d0a1a0a")).decode()
    output = [
        {"type": "input_text", "text": "Look."},
        {"type": "input_image", "image_url": f"data:image/png;base64,{pixel}"},
    ]
    usages = []
    for parts in (output, output[:1]):
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": parts}
        answer = await client.responses.create(
            model="gemma-4", previous_response_id=first.id, input=[result], tools=[WEATHER]
        )
        assert answer.usage is not None
        usages.append(answer.usage.input_tokens)

    assert usages[0] > usages[1] + 100


async def test_nothing_of_what_was_said_reaches_the_operators(one: Site) -> None:
    await one.openai().responses.create(model="gemma-4", input=SKY, max_output_tokens=5)
    async with clients.http(base_url=one.admin_url) as client:
        requests = (await client.get("/admin/requests")).text

    assert "sky blue" not in requests
