"""A response in the making: what a chat answer says in, the response and the events of its stream out. Pure.

A streamed answer is written piece by piece, a whole one in a single piece, by the same code; so both end as
the same response. All that a draft knows stands in its fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.answers import usage_of
from gateway.core.responses.items import item_id
from gateway.core.usage import Usage

Event = dict[str, Any]
"""An event's data: `type`, `sequence_number`, and what its type has beside."""

PartType = Literal["output_text", "refusal", "reasoning_text"]
_TEXT_NAMES: Mapping[PartType, str] = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}
_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES: Mapping[str, str] = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}
"""The API's own few codes, by the type of an error; typed clients know no others."""


@dataclass(slots=True)
class _Part:
    """A text of an item, while it grows."""

    type: PartType
    texts: list[str] = field(default_factory=list)

    def shown(self) -> Mapping[str, Any]:
        shown = {"type": self.type, _TEXT_NAMES[self.type]: "".join(self.texts)}
        return shown | {"annotations": [], "logprobs": []} if self.type == "output_text" else shown


@dataclass(slots=True)
class _Item:
    """An item of the output, while it grows: a message or a thought with its parts, or a call."""

    kind: str
    id: str
    index: int
    status: str = "in_progress"
    is_void: bool = False
    parts: list[_Part] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def shown(self) -> Mapping[str, Any]:
        head = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == "function_call":
            arguments = "".join(self.arguments)
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": arguments}
        parts = [part.shown() for part in self.parts]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": parts}
        return {**head, "role": "assistant", "content": parts}


@dataclass(slots=True)
class Draft:
    """A response that is being written.

    Attributes:
        response: As far as it is known. Complete once it is over, and then the caller's to change.
        token: Names the response; its items' ids are made of it.
        first_index: Items of its input: those of its output are counted on from there.
        sequence_number: Of the next event.
        items: Its output so far, in order.
        speaking: The message or thought that is being written, if one is.
        calls: The calls by their place in the chat's list.
        finish_reason: The chat's, once it has come.
        usage: The chat's, once it has come.
        is_over: Whether the last event has been given out.
    """

    response: dict[str, Any]
    token: str
    first_index: int
    sequence_number: int = 0
    items: list[_Item] = field(default_factory=list)
    speaking: _Item | None = None
    calls: dict[int, _Item] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Usage | None = None
    is_over: bool = False

    def begin(self) -> list[Event]:
        """Return the events in front of everything else."""
        return [self._state("response.created"), self._state("response.in_progress")]

    def queue(self) -> list[Event]:
        """Return the events of a response that waits to be begun."""
        self.response["status"] = "queued"
        return [self._state("response.created"), self._state("response.queued")]

    def start(self) -> list[Event]:
        """Return the event of a response that waited, and is begun now."""
        self.response["status"] = "in_progress"
        return [self._state("response.in_progress")]

    def restart(self) -> list[Event]:
        """Return the events of an answer that begins anew: what was said so far counts no more.

        Its items keep their places in the stream, unfinished, and are not in the response.
        """
        events: list[Event] = []
        self._close_speaking(events, "incomplete")
        for item in self.items:
            if item.status == "in_progress":  # a call: who follows must not wait for the rest of it
                item.status = "incomplete"
                events.append(self._item_done(item))
            item.is_void = True
        self.calls.clear()
        self.finish_reason = self.usage = None
        return events

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events that a chat chunk, or a whole chat answer, is worth."""
        events: list[Event] = []
        self.usage = usage_of(chunk.get("usage")) or self.usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping) or choice.get("index"):
                continue  # a response has one answer; a chat may have asked for several
            said = choice.get("delta") or choice.get("message")
            if isinstance(said, Mapping):
                self._said(said, events)
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and self.finish_reason is None:
                self.finish_reason = reason
                self._close_all(events)
        return events

    def complete(self, now: int) -> list[Event]:
        """Return the last event: the answer has come to its end, in epoch seconds `now`."""
        reason = _INCOMPLETE.get(self.finish_reason or "")
        self.response["status"] = "completed" if reason is None else "incomplete"
        self.response["completed_at"] = now if reason is None else None
        self.response["incomplete_details"] = None if reason is None else {"reason": reason}
        return self._end()

    def cancel(self) -> list[Event]:
        """Return the last event of an answer that nobody wants any more."""
        for item in self.items:
            if item.status == "in_progress":
                item.status = "incomplete"
        self.response["status"] = "cancelled"
        return self._end("response.incomplete")  # typed clients know no event of its own for it

    def fail(self, error_type: str, message: str) -> list[Event]:
        """Return the last event of an answer that broke off, by an error of that type."""
        for item in self.items:
            if item.status == "in_progress":
                item.status = "incomplete"
        self.response["status"] = "failed"
        code = _ERROR_CODES.get(error_type, "server_error")
        self.response["error"] = {"code": code, "message": message}
        return self._end()

    # -------------------------------------------------------------- what is said

    def _said(self, said: Mapping[str, Any], events: list[Event]) -> None:
        thought = said.get("reasoning") or said.get("reasoning_content")
        self._say("reasoning_text", thought, events)
        self._say("output_text", said.get("content"), events)
        self._say("refusal", said.get("refusal"), events)
        calls = said.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                index = call.get("index")
                self._called(index if isinstance(index, int) else place, call, events)

    def _say(self, kind: PartType, text: object, events: list[Event]) -> None:
        if not isinstance(text, str) or not text:
            return
        item, part = self._part(kind, events)
        part.texts.append(text)
        event = self._event(f"response.{kind}.delta", **_within(item), delta=text)
        events.append(event | {"logprobs": []} if kind == "output_text" else event)

    def _part(self, kind: PartType, events: list[Event]) -> tuple[_Item, _Part]:
        """Return the part that text of this kind goes on in, opened where none is."""
        item_kind = "reasoning" if kind == "reasoning_text" else "message"
        if self.speaking is not None and self.speaking.kind != item_kind:
            self._close_speaking(events)
        if self.speaking is None:
            self.speaking = self._open(item_kind, events)
        item = self.speaking
        if item.parts and item.parts[-1].type != kind:
            self._close_part(item, events)
        if not item.parts or item.parts[-1].type != kind:
            item.parts.append(_Part(kind))
            shown = item.parts[-1].shown()
            events.append(self._event("response.content_part.added", **_within(item), part=shown))
        return item, item.parts[-1]

    def _called(self, place: int, call: Mapping[str, Any], events: list[Event]) -> None:
        """Take a piece of a call. It is shown as soon as its name is known."""
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, text, id_ = function.get("name"), function.get("arguments"), call.get("id")
        item = self.calls.get(place)
        if item is None:
            self._close_speaking(events)
            item = self.calls[place] = _Item("function_call", "", -1)
        if isinstance(id_, str):
            item.call_id = item.call_id or id_
        if isinstance(text, str) and text:
            item.arguments.append(text)
        if not item.id and isinstance(name, str) and name:
            item.name = name
            self._show_call(item, events)
        elif item.id and isinstance(text, str) and text:
            events.append(self._arguments_delta(item, text))

    def _show_call(self, item: _Item, events: list[Event]) -> None:
        self._place(item)
        item.call_id = item.call_id or f"call_{item.id.partition('_')[2]}"
        arguments, item.arguments = item.arguments, []
        events.append(self._event("response.output_item.added", output_index=item.index, item=item.shown()))
        item.arguments = arguments
        if text := "".join(arguments):
            events.append(self._arguments_delta(item, text))

    def _arguments_delta(self, item: _Item, text: str) -> Event:
        place = {"item_id": item.id, "output_index": item.index}
        return self._event("response.function_call_arguments.delta", **place, delta=text)

    # -------------------------------------------------------------- opening and closing

    def _place(self, item: _Item) -> None:
        item.index = len(self.items)
        item.id = item_id(item.kind, self.token, self.first_index + item.index)
        self.items.append(item)

    def _open(self, kind: str, events: list[Event]) -> _Item:
        item = _Item(kind, "", -1)
        self._place(item)
        events.append(self._event("response.output_item.added", output_index=item.index, item=item.shown()))
        return item

    def _close_part(self, item: _Item, events: list[Event]) -> None:
        part = item.parts[-1]
        shown = part.shown()
        done = {_TEXT_NAMES[part.type]: shown[_TEXT_NAMES[part.type]]}
        if part.type == "output_text":
            done["logprobs"] = []
        events.append(self._event(f"response.{part.type}.done", **_within(item), **done))
        events.append(self._event("response.content_part.done", **_within(item), part=shown))

    def _close_speaking(self, events: list[Event], status: str = "completed") -> None:
        item = self.speaking
        if item is None:
            return
        self.speaking = None
        self._close_part(item, events)
        item.status = status
        events.append(self._item_done(item))

    def _item_done(self, item: _Item) -> Event:
        return self._event("response.output_item.done", output_index=item.index, item=item.shown())

    def _close_all(self, events: list[Event]) -> None:
        """End every item: the answer is at its end. If it was cut, the last thing in it was."""
        if self.speaking is None and not self.calls:
            self._part("output_text", events)  # an answer without a word is a message without a word
        last = self.speaking or list(self.calls.values())[-1]
        last_status = "incomplete" if self.finish_reason in _INCOMPLETE else "completed"
        self._close_speaking(events, last_status)
        for item in self.calls.values():
            if not item.id:
                self._show_call(item, events)
            item.status = last_status if item is last else "completed"
            place = {"item_id": item.id, "output_index": item.index}
            arguments = "".join(item.arguments)
            events.append(
                self._event(
                    "response.function_call_arguments.done", **place, name=item.name, arguments=arguments
                )
            )
            events.append(self._item_done(item))

    def _end(self, kind: str = "") -> list[Event]:
        self.is_over = True
        self.response["output"] = [item.shown() for item in self.items if not item.is_void]
        self.response["usage"] = None if self.usage is None else _usage(self.usage)
        event = self._state(kind or f"response.{self.response['status']}")
        return [event | {"response": self.response}]

    def _state(self, kind: str) -> Event:
        return self._event(kind, response=dict(self.response))

    def _event(self, kind: str, /, **members: Any) -> Event:
        event = {"type": kind, "sequence_number": self.sequence_number, **members}
        self.sequence_number += 1
        return event


def _within(item: _Item) -> Mapping[str, Any]:
    """Return what names the part of an item that is being written."""
    return {"item_id": item.id, "output_index": item.index, "content_index": max(0, len(item.parts) - 1)}


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
