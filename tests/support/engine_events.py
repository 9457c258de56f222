"""Answers as vLLM 0.32 writes them, event by event, and what comes of them on their way through remedies."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core import quirks
from gateway.core.naming import ModelNames
from gateway.core.policy import ReasoningField
from gateway.core.quirks import MendingReader
from gateway.core.quirks.plan import Plan
from gateway.core.quirks.remedy import Remedy
from gateway.core.request import Endpoint, Prompt, Request

HEAD = {
    "id": "chatcmpl-8ede7bfd509e8145",
    "object": "chat.completion.chunk",
    "created": 1795248717,
    "model": "gemma-4",
}
DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 61,
    "total_tokens": 75,
    "completion_tokens": 14,
    "completion_tokens_details": {"reasoning_tokens": 0},
}
NAMES = ModelNames("gemma-4", "gemma-4")


@dataclass
class Asked:
    """A request, and members of its body."""

    request: Request
    members: Mapping[str, Any]

    def member(self, name: str) -> Any:
        return self.members.get(name)


def plan_for(
    *names: str,
    endpoint: Endpoint = Endpoint.CHAT,
    stream: bool = False,
    tools: int = 0,
    thinking: bool = False,
    reasoning: ReasoningField = ReasoningField.AS_SENT,
    reasons_by_name: bool = False,
    **members: Any,
) -> Plan:
    """Return what is done for a request on a backend with the quirks `names`, and some without remedies."""
    prompt = Prompt(thinking=thinking)
    request = Request(
        endpoint=endpoint, model="m", prompt=prompt, stream=stream, tools=tools, reasoning=thinking
    )
    with_others = (*names, "long_prefill_stalls")
    return quirks.plan(with_others, Asked(request, members), reasoning, reasons_by_name=reasons_by_name)


def event(**fields: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({**HEAD, **fields}, separators=(",", ":"), ensure_ascii=False).encode()
        + b"\n\n"
    )


def role(index: int = 0) -> bytes:
    """The first event of a choice, written with its first token."""
    choice = {
        "index": index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    return event(choices=[choice], prompt_token_ids=None, prompt_text=None)


def delta(index: int = 0, finish: str | None = None, stop: str | int | None = None, **said: Any) -> bytes:
    """An event of one choice, the last of it where there is a `finish`."""
    choice: dict[str, Any] = {"index": index, "delta": said, "logprobs": None, "finish_reason": finish}
    if finish is not None:
        choice["stop_reason"] = stop
    return event(choices=[{**choice, "token_ids": None}])


def name_of_call(name: str = "get_weather", *, call: int = 0, index: int = 0) -> bytes:
    """The event that begins a tool call."""
    began = {"id": f"chatcmpl-tool-{call}", "type": "function", "index": call, "function": {"name": name}}
    return delta(index, tool_calls=[began])


def arguments(text: str, *, call: int = 0, index: int = 0) -> bytes:
    """An event with a part of a tool call's arguments."""
    return delta(index, tool_calls=[{"index": call, "function": {"arguments": text}}])


def usage() -> bytes:
    """The event before `[DONE]`, where it was asked for."""
    return event(choices=[], usage=USAGE, system_fingerprint="vllm-0.32.0-ef74b8d6")


def decoded(wire: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream without `[DONE]`."""
    lines = [line[6:] for line in wire.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def said(wire: bytes, name: str = "content", index: int = 0) -> str:
    """Return what a choice says in all, in the member `name` of its deltas."""
    return "".join(
        choice["delta"].get(name) or ""
        for one in decoded(wire)
        for choice in one["choices"]
        if choice["index"] == index
    )


def through(
    remedies: Iterable[Remedy], pieces: Sequence[bytes], *, choices: int = 1
) -> tuple[bytes, MendingReader]:
    """Return what a stream that arrives in `pieces` becomes, and the reader that followed it."""
    reader = MendingReader(remedies, choices=choices, names=NAMES, hide_usage=False)
    return b"".join([*(reader.feed(piece) for piece in pieces), reader.end()]), reader


def at_every_cut(make: Callable[[], Iterable[Remedy]], wire: bytes, *, choices: int = 1) -> bytes:
    """Return what a stream becomes, having seen that it does not depend on where its bytes were cut."""
    whole, _ = through(make(), [wire], choices=choices)
    for cut in range(1, len(wire)):
        assert through(make(), [wire[:cut], wire[cut:]], choices=choices)[0] == whole, cut
    assert through(make(), one_by_one(wire), choices=choices)[0] == whole
    return whole


def one_by_one(wire: bytes) -> list[bytes]:
    """Return the events of a stream, as an engine that is read at once sends them."""
    return [event + b"\n\n" for event in wire.split(b"\n\n") if event]
