"""Assembly of a stream's events into a non-streaming chat answer, in the form the engine would have used."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.naming import ModelNames
from gateway.core.quirks.mending import MendingReader, encode
from gateway.core.quirks.remedy import Remedy

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_EMPTY_MESSAGE: Mapping[str, Any] = {
    "content": None,
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
}


class AssemblingReader(MendingReader):
    """Reads a stream without relaying it; `whole` returns the answer once every choice has finished."""

    def __init__(self, remedies: Iterable[Remedy], *, choices: int, names: ModelNames) -> None:
        """Assemble the answer after applying `remedies`; the other arguments are those of `StreamReader`."""
        super().__init__(remedies, choices=choices, names=names, hide_usage=False)
        self._top: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def feed(self, data: bytes) -> bytes:
        """Process received bytes. Always returns b"", because nothing is relayed yet."""
        super().feed(data)
        return b""

    def whole(self) -> bytes:
        """Return the body of the answer."""
        top = dict(self._top)
        body = {name: top.pop(name, None) for name in ("id", "object", "created", "model")}
        body["object"] = "chat.completion"
        body["choices"] = [self._choices[index].whole(index) for index in sorted(self._choices)]
        body |= {name: top.pop(name, None) for name in ("service_tier", "system_fingerprint", "usage")}
        return self._names.in_event(encode(body | top))

    def _says_nothing(self, events: bytes) -> bool:
        return False  # every event contributes to the answer

    def _inspect(self, block: bytes, *, parse: bool = False) -> Iterator[bytes]:
        return super()._inspect(block, parse=True)

    def _mended(self, event: bytes, decoded: dict[str, Any]) -> bytes:
        super()._mended(event, decoded)
        for name, value in decoded.items():
            if name != "choices" and (value is not None or name not in self._top):
                self._top[name] = value
        choices = decoded.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                index = choice.get("index")
                self._choices.setdefault(index if isinstance(index, int) else 0, _Choice()).add(choice)
        return b""


@dataclass(slots=True)
class _Choice:
    """The received part of one choice."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    calls: dict[int, "_Call"] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)  # other members of its deltas
    logprobs: dict[str, Any] | None = None
    members: dict[str, Any] = field(default_factory=dict)  # other members of the choice itself

    def add(self, choice: Mapping[str, Any]) -> None:
        for name, value in choice.items():
            match name, value:
                case "index", _:
                    pass
                case "delta", dict():
                    self._say(value)
                case "logprobs", dict():
                    self.logprobs = {} if self.logprobs is None else self.logprobs
                    for kind, more in value.items():
                        _extend(self.logprobs, kind, more)
                case "token_ids", list():
                    _extend(self.members, name, value)
                case "delta" | "logprobs", _:
                    pass
                case _ if value is not None or name not in self.members:
                    self.members[name] = value

    def whole(self, index: int) -> dict[str, Any]:
        members = dict(self.members)
        return {
            "index": index,
            "message": self._message(),
            "logprobs": self.logprobs,
            "finish_reason": members.pop("finish_reason", None),
            **members,
        }

    def _say(self, delta: Mapping[str, Any]) -> None:
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, str):
                self.texts.setdefault(name, []).append(value)
            elif name == "tool_calls" and isinstance(value, list):
                for place, part in enumerate(value):
                    if isinstance(part, dict):
                        at = part.get("index")
                        self.calls.setdefault(at if isinstance(at, int) else place, _Call()).add(part)
            elif value is not None:
                self.said[name] = value

    def _message(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self.texts.items()}
        message: dict[str, Any] = {"role": "assistant", **_EMPTY_MESSAGE, **self.said}
        if self.calls:
            message["tool_calls"] = [self.calls[at].whole() for at in sorted(self.calls)]
        thought = {name: texts[name] or None for name in _TEXTS[1:3] if name in texts}
        message |= thought or {"reasoning": None}
        message["refusal"] = texts.get("refusal") or None
        # Without text, content is null if there is reasoning or a tool call, else an empty string.
        speechless = bool(self.calls) or any(thought.values())
        message["content"] = texts.get("content") or (None if speechless else "")
        return message


@dataclass(slots=True)
class _Call:
    """The received part of a tool call."""

    members: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, part: Mapping[str, Any]) -> None:
        function = part.get("function")
        if isinstance(function, dict):
            name, arguments = function.get("name"), function.get("arguments")
            self.name += name if isinstance(name, str) else ""
            self.arguments.append(arguments if isinstance(arguments, str) else "")
        for name, value in part.items():
            if name not in ("index", "function") and value is not None:
                self.members[name] = value

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {**self.members, "function": function}


def _extend(held: dict[str, Any], name: str, more: Any) -> None:
    """Append the items of a list to the list held under `name`; any other value replaces it."""
    if isinstance(more, list) and isinstance(held.get(name), list):
        held[name] += more
    elif more is not None or name not in held:
        held[name] = more
