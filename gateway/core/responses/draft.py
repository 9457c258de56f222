"""Incremental translation of a chat answer to a response and the events of its stream. Pure.

The same code translates a streamed answer chunk by chunk and a non-streaming answer as one chunk, so both
give the same response. The fields of a draft are its complete state.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.answers import usage_of
from gateway.core.responses.items import item_id
from gateway.core.responses.tools import own_name
from gateway.core.usage import Usage

Event = dict[str, Any]
"""An event's data: `type`, `sequence_number`, and the members specific to its type."""

PartType = Literal["output_text", "refusal", "reasoning_text"]
_TEXT_NAMES: Mapping[PartType, str] = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}
_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES: Mapping[str, str] = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}
"""Error codes of the API by error type. Other types become `server_error`: typed clients know few codes."""


@dataclass(slots=True)
class _Part:
    """A text part of an item in progress."""

    type: PartType
    texts: list[str] = field(default_factory=list)

    def shown(self) -> Mapping[str, Any]:
        shown = {"type": self.type, _TEXT_NAMES[self.type]: "".join(self.texts)}
        return shown | {"annotations": [], "logprobs": []} if self.type == "output_text" else shown


@dataclass(slots=True)
class _Item:
    """An output item in progress: a message or reasoning with its parts, or a function call."""

    kind: str
    id: str
    index: int
    status: str = "in_progress"
    is_void: bool = False
    parts: list[_Part] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: list[str] = field(default_factory=list)

    def shown(self) -> Mapping[str, Any]:
        head = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == "function_call":
            arguments = "".join(self.arguments)
            space = {"namespace": self.namespace} if self.namespace else {}
            return {**head, "call_id": self.call_id, "name": self.name, **space, "arguments": arguments}
        parts = [part.shown() for part in self.parts]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": parts}
        return {**head, "role": "assistant", "content": parts}


@dataclass(slots=True)
class Draft:
    """A response in progress.

    Attributes:
        response: The response so far. Complete once `is_over`; the caller may then modify it.
        token: Identifies the response; the ids of its items are derived from it.
        first_index: Number of input items, from which the numbering of output items continues.
        sequence_number: Number of the next event.
        items: The output so far, in order.
        speaking: The message or reasoning item in progress, or None.
        calls: The function calls by their index in the chat answer.
        finish_reason: The chat's `finish_reason`, once received.
        usage: The chat's usage, once received.
        is_over: Whether the last event has been returned.
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
        """Return the first events of a response that starts at once."""
        return [self._state("response.created"), self._state("response.in_progress")]

    def queue(self) -> list[Event]:
        """Return the first events of a response that is queued."""
        self.response["status"] = "queued"
        return [self._state("response.created"), self._state("response.queued")]

    def start(self) -> list[Event]:
        """Return the event for the start of a queued response."""
        self.response["status"] = "in_progress"
        return [self._state("response.in_progress")]

    def restart(self) -> list[Event]:
        """Return the events for an answer that starts over, which discards the output so far.

        Its items keep their indexes in the stream, as incomplete, and are left out of the response.
        """
        events: list[Event] = []
        self.speaking = None  # its parts are not closed: readers would take half a JSON text for a whole one
        for item in self.items:
            if item.status == "in_progress":  # readers must not wait for the rest of it
                item.status = "incomplete"
                events.append(self._item_done(item))
            item.is_void = True
        self.calls.clear()
        self.finish_reason = self.usage = None
        return events

    def add(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events for a chat chunk or a non-streaming chat answer."""
        events: list[Event] = []
        self.usage = usage_of(chunk.get("usage")) or self.usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping) or choice.get("index"):
                continue  # a response has a single choice, but a chat may have several
            said = choice.get("delta") or choice.get("message")
            if isinstance(said, Mapping):
                self._said(said, events)
            reason = choice.get("finish_reason")
            if reason and isinstance(reason, str) and self.finish_reason is None:
                self.finish_reason = reason
                self._close_all(events)
        return events

    def complete(self, now: int) -> list[Event]:
        """Return the last events of an answer that ended at `now` (epoch seconds)."""
        events: list[Event] = []
        if self.speaking is not None or any(call.status == "in_progress" for call in self.calls.values()):
            self._close_all(events)  # it was said after the `finish_reason`
        reason = _INCOMPLETE.get(self.finish_reason or "")
        self.response["status"] = "completed" if reason is None else "incomplete"
        self.response["completed_at"] = now if reason is None else None
        self.response["incomplete_details"] = None if reason is None else {"reason": reason}
        return [*events, *self._end()]

    def cancel(self) -> list[Event]:
        """Return the last event of a cancelled answer."""
        for item in self.items:
            if item.status == "in_progress":
                item.status = "incomplete"
        self.response["status"] = "cancelled"
        return self._end("response.incomplete")  # typed clients have no event type for cancellation

    def fail(self, error_type: str, message: str) -> list[Event]:
        """Return the last events of an answer that failed with an error of that type.

        As in OpenAI's own streams, `error` comes first: SDKs raise on its member `error`, and many callers
        overlook `response.failed` and take a truncated answer for a whole one. Its other members are those
        that OpenAI documents.
        """
        for item in self.items:
            if item.status == "in_progress":
                item.status = "incomplete"
        self.response["status"] = "failed"
        code = _ERROR_CODES.get(error_type, "server_error")
        self.response["error"] = {"code": code, "message": message}
        said = {"code": code, "message": message, "param": None}
        return [self._event("error", **said, error={"type": error_type, **said}), *self._end()]

    # -------------------------------------------------------------- content

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
        """Return the current part for text of this kind, opening one if necessary."""
        item_kind = "reasoning" if kind == "reasoning_text" else "message"
        if self.speaking is not None and self.speaking.kind != item_kind:
            self._close_speaking(events)
        if self.speaking is None:
            self._announce(events, and_then=True)
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
        """Add a piece of a function call."""
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, text, id_ = function.get("name"), function.get("arguments"), call.get("id")
        item = self.calls.get(place)
        if item is None:
            self._close_speaking(events)
            item = self.calls[place] = _Item("function_call", "", -1)
        if isinstance(id_, str):
            item.call_id = item.call_id or id_
        if not item.id and isinstance(name, str) and name:
            item.namespace, item.name = own_name(self.response.get("tools"), name)
        if isinstance(text, str) and text and item.status == "in_progress":
            item.arguments.append(text)
            if item.id:
                events.append(self._arguments_delta(item, text))
        self._announce(events)

    def _announce(self, events: list[Event], *, and_then: bool = False) -> None:
        """Announce the calls in order, each when its name is known and those before it are complete.

        Many clients take every event to belong to the item that was announced last. So the pieces of a call
        wait here until the arguments of the one before it are a whole JSON object.

        `and_then`: another item follows the last call, too.
        """
        last = None if and_then else len(self.calls) - 1
        for position, item in enumerate(self.calls.values()):
            if item.status != "in_progress":
                continue
            if not item.id and item.name:
                self._show_call(item, events)
            if position == last or not item.id or not _is_object(item.arguments):
                return
            self._close_call(item, "completed", events)

    def _show_call(self, item: _Item, events: list[Event]) -> None:
        self._close_speaking(events)
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
        """Close all items at the end of the answer. If it was truncated, the last item is incomplete."""
        if self.speaking is None and not self.calls:
            self._part("output_text", events)  # an empty answer is an empty message
        last = self.speaking or list(self.calls.values())[-1]
        last_status = "incomplete" if self.finish_reason in _INCOMPLETE else "completed"
        self._close_speaking(events, last_status)
        for item in self.calls.values():
            if item.status == "in_progress":
                self._close_call(item, last_status if item is last else "completed", events)

    def _close_call(self, item: _Item, status: str, events: list[Event]) -> None:
        if not item.id:
            self._show_call(item, events)
        item.status = status
        done = {"output_index": item.index, "name": item.name, "arguments": "".join(item.arguments)}
        events.append(self._event("response.function_call_arguments.done", item_id=item.id, **done))
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
    """Return the members that identify the current part of an item."""
    return {"item_id": item.id, "output_index": item.index, "content_index": len(item.parts) - 1}


def _is_object(pieces: Sequence[str]) -> bool:
    """Return whether these pieces of arguments are a whole JSON object, after which no more can come."""
    if not pieces or not pieces[-1].rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads("".join(pieces)), dict)
    except (ValueError, RecursionError):
        return False


def _usage(usage: Usage) -> Mapping[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
