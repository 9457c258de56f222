"""Reasoning that arrives inside the content, with or without its channel markers.

There are two faults. If special tokens are dropped before the engine's parser runs, or if there is no parser,
the reasoning runs into the answer without a separator. The backend is then asked to keep the markers, and the
reasoning is extracted here. With an old chat template, an answer without reasoning begins with the markers of
empty reasoning, which are removed here. Only markers at the beginning of an answer count; others are text.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from gateway.core.quirks.plan import Plan, RemedyRequest, Workaround
from gateway.core.quirks.remedy import Remedy, beginning
from gateway.core.quirks.turn_marker import TurnMarker

OPEN, NAME, CLOSE = "<|channel>", "thought\n", "<channel|>"


class _At(Enum):
    LEAD = auto()  # where reasoning may begin
    NAME = auto()  # after the opening marker
    THOUGHT = auto()
    ANSWER = auto()


@dataclass(slots=True)
class _Choice:
    """Parser state of a choice, with the text held back until it can be classified."""

    at: _At = _At.LEAD
    held: str = ""

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Return the parts of the text that belong to the reasoning and to the answer."""
        thought, text, self.held = "", self.held + text, ""
        while True:
            match self.at:
                case _At.LEAD if text.startswith(OPEN):
                    self.at, text = _At.NAME, text.removeprefix(OPEN)
                case _At.LEAD if OPEN.startswith(text) and not is_last:
                    self.held = text
                    return thought, ""
                case _At.LEAD:
                    self.at = _At.ANSWER
                case _At.NAME if NAME.startswith(text) and text != NAME and not is_last:
                    self.held = text
                    return thought, ""
                case _At.NAME:
                    self.at, text = _At.THOUGHT, text.removeprefix(NAME.strip()).removeprefix("\n")
                case _At.THOUGHT if CLOSE in text:
                    said, _, text = text.partition(CLOSE)
                    self.at, thought = _At.LEAD, thought + said
                case _At.THOUGHT:
                    self.held = "" if is_last else beginning(text, CLOSE)
                    return thought + text.removesuffix(self.held), ""
                case _:
                    return thought, text


class Channels(Remedy):
    """Moves reasoning at the beginning of each choice's content to the reasoning member."""

    whole_marks = b"channel"  # part of the markers; letters are never escaped

    def __init__(self, asked: RemedyRequest) -> None:
        """Process the choices of the answer to a request, and drop the reasoning if it does not want any."""
        self._asked = asked
        self._read: list[_Choice] = []  # made with the first part: most answers have none to correct
        self._shows_thought = True

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`."""
        content = part.get("content")
        said = content if isinstance(content, str) else ""
        choices = self._read or self._begin()
        if not 0 <= index < len(choices) or choices[index].at is _At.ANSWER:
            return False
        thought, answer = choices[index].read(said, is_last=finish is not None)
        self.is_idle = all(choice.at is _At.ANSWER for choice in choices)
        if answer == said and not thought:
            return False
        if thought and self._shows_thought:
            name = (
                "reasoning" if "reasoning" in part or "reasoning_content" not in part else "reasoning_content"
            )
            before = part.get(name)
            part[name] = (before if isinstance(before, str) else "") + thought
        part["content"] = answer or (None if thought else "")
        return True

    def _begin(self) -> list[_Choice]:
        self._shows_thought = self._asked.member("include_reasoning") is not False
        self._read = [_Choice() for _ in range(self._asked.request.choices)]
        return self._read


def _lost(plan: Plan) -> None:
    path = ("skip_special_tokens",)
    if not plan.is_chat or not plan.thinks or path in plan.changes:
        return
    if plan.asked.member("skip_special_tokens") is not None:
        return  # the caller's own choice is respected
    plan.changes[path] = False
    plan.remedies += [Channels(plan.asked), TurnMarker()]


def _leading(plan: Plan) -> None:
    if plan.is_chat and not plan.thinks:
        plan.remedies.append(Channels(plan.asked))


NULL_REASONING = Workaround(issue="vLLM #38855", versions="0.19, fixed by PR #39027", rule=_lost)
NO_PARSER = Workaround(issue="none: the recipe", versions="any", rule=_lost)
STALE_TEMPLATE = Workaround(issue="none: the checkpoint", versions="any", rule=_leading)
