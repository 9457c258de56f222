"""vLLM's answers as bytes: the events of a stream, and the body of an answer in one piece.

Members stand in the order and with the nulls that vLLM 0.33 writes. What all events of a stream share is
built once; per event only the text is escaped.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.core.prefix_cache import BLOCK_TOKENS
from gateway.core.value import valueclass
from gateway.simulator.calls import Call, Delivery
from gateway.simulator.host import Answer, Seat
from gateway.simulator.refusals import engine_dead

_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

_NO_VERSIONS = ',"weight_versions":null'
_NO_TRANSFER = ',"kv_transfer_params":null'

DONE = b"data: [DONE]\n\n"


@valueclass(frozen=True, slots=True)
class Identity:
    """What every part of one answer repeats.

    Attributes:
        id: e.g. `chatcmpl-b29ef523dc2366c2`.
        created: Epoch seconds.
        model: Served name.
        fingerprint: `system_fingerprint`.
    """

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(slots=True)
class _Sent:
    """How much of a seat has been written."""

    tokens: int = 0
    ids: int = 0  # ids lag behind text: they wait for the next event that is written
    is_finished: bool = False


class StreamWriter:
    """Turns the progress of an answer into events."""

    def __init__(self, call: Call, answer: Answer, identity: Identity) -> None:
        self._call = call
        self._delivery = call.delivery
        self._answer = answer
        self._sent = [_Sent() for _ in answer.seats]
        self._roles_sent = not call.delivery.is_chat
        self._write = self._chat_events if call.delivery.is_chat else self._completion_events
        kind = "chat.completion.chunk" if call.delivery.is_chat else "text_completion"
        head = {"id": identity.id, "object": kind, "created": identity.created, "model": identity.model}
        self._head = "data: " + _json(head)[:-1] + ',"choices":['
        self._fingerprint = f',"system_fingerprint":{_json(identity.fingerprint)}'

    @property
    def is_finished(self) -> bool:
        """Whether every choice's last event has been written."""
        return all(sent.is_finished for sent in self._sent)

    def events(self) -> Iterator[bytes]:
        """Yield the events that are due, each to be sent by itself."""
        if not self._roles_sent and self._answer.has_begun:
            self._roles_sent = True
            for index in range(len(self._sent)):
                yield self._role(index)
        for index, (seat, sent) in enumerate(zip(self._answer.seats, self._sent, strict=True)):
            if sent.is_finished:
                continue
            ended = seat.finish is not None
            if not ended and seat.gained - sent.tokens < (self._delivery.interval if sent.tokens else 1):
                continue
            yield from self._write(index, seat, sent, ended)
            sent.tokens = seat.gained
            seat.due = seat.gained + self._delivery.interval

    def aborted(self) -> Iterator[bytes]:
        """Yield an event for every choice that has not ended, saying that it was cut off."""
        for index, (seat, sent) in enumerate(zip(self._answer.seats, self._sent, strict=True)):
            if not sent.is_finished or seat.finish == "abort":
                seat.finish = "abort"
                seat.gained = sent.tokens
                yield from self._write(index, seat, sent, True)

    def broken(self) -> bytes:
        """Return the event that says that the engine died."""
        said = engine_dead().body
        if not self._delivery.is_chat:  # with spaces, unlike all other JSON on vLLM's wire
            said = json.dumps(json.loads(said)).encode()
        return b"data: " + said + b"\n\n"

    def closing(self) -> Iterator[bytes]:
        """Yield the events after the last choice has ended."""
        if self._delivery.include_usage:
            usage = _json(usage_of(self._call, self._answer.seats, brief=True))
            yield f'{self._head}],"usage":{usage}{self._fingerprint}}}\n\n'.encode()
        yield DONE

    # -------------------------------------------------------------- chat

    def _role(self, index: int) -> bytes:
        prompt = self._call.prompts[self._call.prompt_of(index)]
        ids = _json(prompt.ids()) if self._delivery.with_ids else "null"
        text = _json(prompt.text()) if self._delivery.with_prompt_text else "null"
        role = _json(self._delivery.role)
        usage = self._running_usage(self._answer.seats[index], 0)
        return (
            f'{self._head}{{"index":{index},"delta":{{"role":{role},"content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{usage},"prompt_token_ids":{ids},"prompt_text":{text}}}\n\n'
        ).encode("utf-8", "replace")

    def _chat_events(self, index: int, seat: Seat, sent: _Sent, ended: bool) -> Iterator[bytes]:
        deltas = list(self._deltas(seat, sent.tokens, seat.gained))
        if ended:
            # The reason rides on the last text; a tool call and an empty end get an event of their own.
            if not deltas or seat.script.calls:
                deltas.append("{}")
            sent.is_finished = True
        for number, delta in enumerate(deltas):
            is_last = ended and number == len(deltas) - 1
            reason = _finish(seat) if is_last else '"finish_reason":null'
            versions = _NO_VERSIONS if is_last else ""
            none = "[]" if self._delivery.with_ids else "null"
            ids = self._ids(seat, sent) if number == len(deltas) - 1 else none
            yield (
                f'{self._head}{{"index":{index},"delta":{delta},"logprobs":null,{reason},'
                f'"token_ids":{ids}{versions}}}]{self._running_usage(seat, seat.gained)}'
                f"{self._signed(is_last)}{_NO_TRANSFER}}}\n\n"
            ).encode("utf-8", "replace")

    def _deltas(self, seat: Seat, start: int, end: int) -> Iterator[str]:
        """Yield what tokens `start` to `end` say, as JSON. Tokens without text say nothing."""
        script = seat.script
        thought = script.thought(start, end) if self._delivery.with_reasoning else ""
        content = script.content(start, end)
        if content and thought:
            yield f'{{"content":{_json(content)},"reasoning":{_json(thought)}}}'
        elif content:
            yield f'{{"content":{_json(content)}}}'
        elif thought:
            yield f'{{"reasoning":{_json(thought)}}}'
        for index, (call, call_id) in enumerate(zip(script.calls, seat.call_ids, strict=True)):
            if start < call.name_at <= end:
                named = {"id": call_id, "type": "function", "index": index, "function": {"name": call.name}}
                yield _json({"tool_calls": [named]})
            if start < call.arguments_at <= end:
                yield _json({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})

    # -------------------------------------------------------------- completions

    def _completion_events(self, index: int, seat: Seat, sent: _Sent, ended: bool) -> Iterator[bytes]:
        text = _json(seat.script.content(sent.tokens, seat.gained))
        prompt = self._call.prompts[self._call.prompt_of(index)]
        is_first = sent.tokens == 0
        prompt_ids = _json(prompt.ids()) if self._delivery.with_ids and is_first else "null"
        sent.is_finished = ended
        reason = _finish(seat) if ended else '"finish_reason":null,"stop_reason":null'
        yield (
            f'{self._head}{{"index":{index},"text":{text},"logprobs":null,{reason},'
            f'"prompt_token_ids":{prompt_ids},"token_ids":{self._ids(seat, sent)}{_NO_VERSIONS}}}]'
            f"{self._running_usage(seat, seat.gained)}{self._signed(ended)}{_NO_TRANSFER}}}\n\n"
        ).encode("utf-8", "replace")

    # -------------------------------------------------------------- both

    def _ids(self, seat: Seat, sent: _Sent) -> str:
        if not self._delivery.with_ids:
            return "null"
        start, sent.ids = sent.ids, seat.gained
        return _json(seat.script.ids(start, seat.gained))

    def _running_usage(self, seat: Seat, tokens: int) -> str:
        if not self._delivery.continuous_usage:
            return ""
        usage = _counts(seat.prompt_tokens, tokens)
        if self._delivery.is_chat:
            usage["completion_tokens_details"] = {"reasoning_tokens": seat.script.thought_tokens(tokens)}
        return f',"usage":{_json(usage)}'

    def _signed(self, is_last_of_choice: bool) -> str:
        """Return the fingerprint for the very last event, which is the usage event where there is one."""
        is_last = is_last_of_choice and self.is_finished and not self._delivery.include_usage
        return self._fingerprint if is_last else ""


def _finish(seat: Seat) -> str:
    return f'"finish_reason":{_json(seat.finish)},"stop_reason":{_json(seat.stop_reason)}'


def usage_of(call: Call, seats: list[Seat], *, brief: bool = False) -> dict[str, Any]:
    """Return the usage of a whole answer; `brief` leaves out what is null, as the usage event does."""
    completion = sum(seat.gained for seat in seats)
    usage = _counts(sum(call.prompt_tokens), completion)
    if call.delivery.with_prompt_details:
        usage["prompt_tokens_details"] = _prompt_details(call, seats, brief=brief)
    elif not brief:
        usage["prompt_tokens_details"] = None
    if call.delivery.is_chat:
        reasoning = sum(seat.script.thought_tokens(seat.gained) for seat in seats)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    elif not brief:
        usage["completion_tokens_details"] = None
    return usage


def _prompt_details(call: Call, seats: list[Seat], *, brief: bool) -> dict[str, int | None]:
    cached = sum(seat.cached_tokens for seat in seats[:: call.choices_per_prompt])
    whole_blocks = sum(len(keys) for keys in call.prompt_keys) * BLOCK_TOKENS
    details: dict[str, int | None] = {"cached_tokens": cached}
    if call.delivery.is_chat:
        details["created_cache_tokens"] = whole_blocks - cached
    if brief:
        return details
    return {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None, **details}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }


def whole(call: Call, answer: Answer, identity: Identity) -> bytes:
    """Return the body of an answer that is not streamed."""
    delivery = call.delivery
    choose = _chat_choice if delivery.is_chat else _completion_choice
    body: dict[str, Any] = {
        "id": identity.id,
        "object": "chat.completion" if delivery.is_chat else "text_completion",
        "created": identity.created,
        "model": identity.model,
        "choices": [choose(call, index, seat) for index, seat in enumerate(answer.seats)],
        "service_tier": None,
        "system_fingerprint": identity.fingerprint,
        "usage": usage_of(call, answer.seats),
    }
    if delivery.is_chat:
        prompt = call.prompts[0]
        body["prompt_logprobs"] = None
        body["prompt_token_ids"] = prompt.ids() if delivery.with_ids else None
        body["prompt_text"] = prompt.text() if delivery.with_prompt_text else None
    body |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return _json(body).encode("utf-8", "replace")


def _chat_choice(call: Call, index: int, seat: Seat) -> dict[str, Any]:
    script, delivery = seat.script, call.delivery
    content = script.content(0, seat.gained)
    message: dict[str, Any] = {
        "role": delivery.role,
        "content": content or None if script.thought_end or script.calls else content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    made = [
        {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call, call_id in zip(script.calls, seat.call_ids, strict=True)
        if seat.gained >= call.arguments_at
    ]
    if made:
        message["tool_calls"] = made
    thought = script.thought(0, seat.gained)
    message["reasoning"] = thought if thought and delivery.with_reasoning else None
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": seat.finish,
        "stop_reason": seat.stop_reason,
        "token_ids": _ids_of(seat, delivery),
        "routed_experts": None,
        "weight_versions": None,
    }


def _completion_choice(call: Call, index: int, seat: Seat) -> dict[str, Any]:
    prompt = call.prompts[call.prompt_of(index)]
    return {
        "index": index,
        "text": seat.script.content(0, seat.gained),
        "logprobs": None,
        "finish_reason": seat.finish,
        "stop_reason": seat.stop_reason,
        "token_ids": _ids_of(seat, call.delivery),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt.ids() if call.delivery.with_ids else None,
        "routed_experts": None,
        "weight_versions": None,
    }


def _ids_of(seat: Seat, delivery: Delivery) -> list[int] | None:
    return seat.script.ids(0, seat.gained) if delivery.with_ids else None
