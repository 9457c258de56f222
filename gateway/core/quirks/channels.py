"""Thoughts that arrive inside the content, between channel markers or after the markers were lost.

Two faults lose them. Where special tokens are skipped before the parser looks, or nothing parses thoughts,
one runs into the answer without a border: the backend is asked to leave the markers in, and the thought is
taken out here. And with an old chat template an answer without a thought begins with the markers of an empty
one: they are taken off. Only markers at the beginning of an answer count; later ones are text.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from gateway.core.quirks.plan import Plan, Workaround
from gateway.core.quirks.remedy import Remedy, beginning
from gateway.core.quirks.turn_marker import TurnMarker

OPEN, NAME, CLOSE = "<|channel>", "thought\n", "<channel|>"


class _At(Enum):
    LEAD = auto()  # where a thought may begin
    NAME = auto()  # behind the marker that opens it
    THOUGHT = auto()
    ANSWER = auto()


@dataclass(slots=True)
class _Choice:
    """How far a choice has been read, and the text that is not settled yet."""

    at: _At = _At.LEAD
    held: str = ""

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Return what `text` adds to the thought and to the answer."""
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
    """Moves the thought at the beginning of every choice's content to where thoughts belong."""

    whole_marks = b"channel"  # of the markers; nobody escapes letters

    def __init__(self, choices: int, *, shows_thought: bool) -> None:
        """Read that many choices; a thought that the caller did not want to see is dropped."""
        self._choices = [_Choice() for _ in range(choices)]
        self._shows_thought = shows_thought

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`."""
        content = part.get("content")
        said = content if isinstance(content, str) else ""
        if not 0 <= index < len(self._choices) or self._choices[index].at is _At.ANSWER:
            return False
        thought, answer = self._choices[index].read(said, is_last=finish is not None)
        self.is_idle = all(choice.at is _At.ANSWER for choice in self._choices)
        if answer == said and not thought:
            return False
        if thought and self._shows_thought:
            name = (
                "reasoning" if "reasoning" in part or "reasoning_content" not in part else "reasoning_content"
            )
            part[name] = (part.get(name) or "") + thought
        part["content"] = answer or (None if thought else "")
        return True


def _shows_thought(plan: Plan) -> bool:
    return plan.asked.member("include_reasoning") is not False


def _lost(plan: Plan) -> None:
    request = plan.asked.request
    path = ("skip_special_tokens",)
    if not plan.is_chat or not request.prompt.thinking or path in plan.changes:
        return
    if plan.asked.member("skip_special_tokens") is not None:
        return  # who asks for the markers, or for none, gets what they ask for
    plan.changes[path] = False
    plan.remedies += [Channels(request.choices, shows_thought=_shows_thought(plan)), TurnMarker()]


def _leading(plan: Plan) -> None:
    request = plan.asked.request
    if plan.is_chat and not request.prompt.thinking:
        plan.remedies.append(Channels(request.choices, shows_thought=_shows_thought(plan)))


NULL_REASONING = Workaround(issue="vLLM #38855", versions="0.19, fixed by PR #39027", rule=_lost)
NO_PARSER = Workaround(issue="none: the recipe", versions="any", rule=_lost)
STALE_TEMPLATE = Workaround(issue="none: the checkpoint", versions="any", rule=_leading)
