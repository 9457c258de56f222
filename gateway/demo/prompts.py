"""What the demo asks: real prompts, made of text that this machine already has.

Documents are the sources and the manual of Python's standard library; every Python has them. The image
is drawn here. Nothing is downloaded, nothing is shipped.
"""

import base64
import re
import struct
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from gateway.core.class_counts import class_count_tokens
from gateway.core.value import valueclass
from gateway.demo.site import MODEL

Message = Mapping[str, Any]

IMAGE_SIDE = 96
"""Pixels per side of the picture. A choice: any size costs the same tokens."""

_LICENCES = Path("/usr/share/common-licenses")
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)


class Kind(StrEnum):
    """What a person would call a request."""

    CHAT = "chat"
    CONVERSATION = "conversation"
    DOCUMENT = "document"
    IMAGE = "image"
    TOOLS = "tool call"
    REASONING = "reasoning"
    TOO_LONG = "too long"


@valueclass(frozen=True, slots=True)
class Ask:
    """One request, and what should come of it.

    Attributes:
        kind: What it is.
        body: The members of the request, beside model and stream.
        stream: Whether the answer is streamed.
        title: What is in it, in a few words.
        refusal: The error code it should end in; "" if it should be answered.
        burst: Number of the burst it is part of; 0 if it is sent alone.
        about_tokens: Its length, where it is worth telling before the gateway has counted it.
        model: Which model is asked.
    """

    kind: Kind
    body: Mapping[str, Any]
    stream: bool = True
    title: str = ""
    refusal: str = ""
    burst: int = 0
    about_tokens: int = 0
    model: str = MODEL


_QUESTIONS = (
    "What is the difference between a river and a canal?",
    "Write a short welcome note for a new colleague who starts on Monday in the Lisbon office.",
    "Name three birds that winter by the North Sea, and say how to tell them apart at dusk.",
    "Translate into French: the night train leaves at ten past nine from platform four.",
    "Explain to a ten-year-old why the sea is salty, without the word sodium.",
    "Give me a title for a talk about bread, and two sentences for the programme.",
    "Rewrite this politely: your report is late again and nobody can read the second chart.",
    "How do I prune an old apple tree that nobody has touched for five years?",
    "What should I check before I lend my bicycle to a friend for a week in the mountains?",
    "Which questions would you ask a lighthouse keeper if you had only ten minutes?",
    "Summarise in one line: the meeting moved to Thursday, the room is smaller, bring your own chair.",
    "What makes a good map for somebody who is afraid of getting lost?",
    "Suggest a dinner for four from leeks, potatoes, mustard and a lemon; nobody eats meat.",
    "Why do old libraries smell the way they do?",
    "I have two hours in Porto between trains. What should I see on foot?",
    "Draft a reply to a customer whose parcel went to the neighbour, who has moved away since.",
)

_MANNERS = (
    "Three sentences will do.",
    "Take your time, and be exact.",
    "Answer as you would to an old friend.",
    "Begin with the part that matters most.",
    "Plain words, please.",
    "If you are not sure, say so.",
    "Give an example that I can try today.",
    "Pretend that I have never heard of any of this.",
    "I will read it aloud, so keep the sentences short.",
    "Tell me what most people get wrong about it.",
    "End with a question that I should ask next.",
    "A little humour is welcome.",
    "I have about a minute to read it.",
    "Leave out whatever I could look up myself.",
    "Say it first in one line, then at length.",
    "Imagine that my grandmother is listening too.",
    "Keep to what can be done without money.",
    "Explain the reason behind each step.",
    "Do not use any lists.",
    "Make it something worth keeping.",
)


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def chat(
    number: int, *, max_tokens: int = 220, min_tokens: int = 0, stream: bool = True, burst: int = 0
) -> Ask:
    """Return the `number`th short question; 320 of them differ, so that no replica has seen one before."""
    question = f"{_QUESTIONS[number % len(_QUESTIONS)]} {_MANNERS[number // len(_QUESTIONS) % len(_MANNERS)]}"
    body: dict[str, Any] = {"messages": _user(question), "max_tokens": max_tokens}
    if min_tokens:
        body["extra_body"] = {"min_tokens": min_tokens}  # vLLM's own: at least this much
    return Ask(Kind.CHAT, body, stream, question, burst=burst)


_TURNS = (
    "I want to build a small garden shed from wood. What do I have to decide first?",
    "The ground is clay and stays wet in winter. Does that change the foundation?",
    "Good. Which wood lasts without paint, and how do I keep its feet dry?",
    "Now the roof: I would like to grow moss on it. What does it weigh when it rains?",
    "Last question: in which order do I do all this, if I have four weekends?",
)


TURNS = len(_TURNS)
"""Turns the conversation has."""


def turn(said: Sequence[Message]) -> Ask:
    """Return the next turn of a conversation, given the messages exchanged so far."""
    number = sum(message["role"] == "user" for message in said)
    messages = [{"role": "system", "content": _advice()}, *said, *_user(_TURNS[number % len(_TURNS)])]
    body = {"messages": messages, "max_tokens": 260}
    return Ask(Kind.CONVERSATION, body, title=f"turn {number + 1}")


def source(tokens: int, first: str) -> Ask:
    """Return a question about program text of about so many tokens that starts with file `first`."""
    text, title = _document(tokens, _files(first))
    messages = _user(f"Summarise this module for a reviewer.\n\n{text}")
    return Ask(Kind.DOCUMENT, {"messages": messages, "max_tokens": 200}, title=title, about_tokens=tokens)


def manual(tokens: int) -> Ask:
    """Return a question about the documentation inside Python's library, about so many tokens of it."""
    text, title = _document(tokens, _files(""), _docstrings)
    messages = _user(f"What would you tell somebody who has an hour to learn this library?\n\n{text}")
    return Ask(
        Kind.DOCUMENT,
        {"messages": messages, "max_tokens": 300},
        title=f"docstrings, {title}",
        about_tokens=tokens,
    )


def reasoning(question: str, *, stream: bool) -> Ask:
    """Return a question that is to be thought about."""
    body = {"messages": _user(question), "max_tokens": 700, "reasoning_effort": "high"}
    return Ask(Kind.REASONING, body, stream, question)


def reasoning_about(tokens: int, first: str) -> Ask:
    """Return a question to be thought about, with a document of about so many tokens."""
    text, title = _document(tokens, _files(first))
    question = "Find the assumption in this module that is most likely to break, and argue it step by step."
    body = {"messages": _user(f"{question}\n\n{text}"), "max_tokens": 160, "reasoning_effort": "high"}
    return Ask(Kind.REASONING, body, True, title, about_tokens=tokens)


def too_long(tokens: int) -> Ask:
    """Return a request that fits no window of the fleet."""
    text, title = _document(tokens, _files(""))
    body = {"messages": _user(f"Summarise all of this.\n\n{text}"), "max_tokens": 300}
    return Ask(Kind.TOO_LONG, body, True, title, refusal="context_length_exceeded", about_tokens=tokens)


def image() -> Ask:
    """Return a question about an image."""
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    content = [
        {"type": "text", "text": "What do you see in this picture?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 200}
    return Ask(Kind.IMAGE, body, title=f"{IMAGE_SIDE}x{IMAGE_SIDE} PNG")


def tool_call() -> Ask:
    """Return a question that a tool answers."""
    function = {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
    body = {
        "messages": _user("Call get_weather for Paris, please: do I need an umbrella?"),
        "max_tokens": 200,
        "tools": [{"type": "function", "function": function}],
    }
    return Ask(Kind.TOOLS, body, stream=False, title="get_weather")


# ------------------------------------------------------------------ text


@cache
def _advice() -> str:
    """Return a system prompt of a page: what a conversation has in common from turn to turn."""
    rules = [f"{number}. {question}" for number, question in enumerate(_QUESTIONS, 1)]
    return "You help people who build things with their hands. Examples of what they ask:\n" + "\n".join(
        rules
    )


def _document(tokens: int, files: Iterator[Path], extract: Callable[[str], str] = str) -> tuple[str, str]:
    """Return a text of about so many tokens, and which files it is made of.

    `extract` takes what it wants of each file's text.
    """
    parts: list[str] = []
    names: list[str] = []
    missing = tokens
    for path in files:
        try:
            text = extract(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        here = class_count_tokens(text)
        if not here:
            continue
        names.append(path.name)
        if here > missing:
            text = _head(text, missing)
            here = missing
        parts.append(text)
        missing -= here
        if missing <= 0:
            break
    while parts and missing > 0:  # a Python without its sources: what there is, again
        parts += parts
        missing -= tokens - missing
    return "\n".join(parts), names[0] if len(names) == 1 else f"{len(names)} files of Python"


def _head(text: str, tokens: int) -> str:
    """Return the beginning of a text, about so many tokens of it."""
    chars = len(text)
    for _ in range(4):  # the text is not the same all over: approach the place
        chars = max(1, min(len(text), chars * tokens // max(1, class_count_tokens(text[:chars]))))
    return text[:chars]


def _docstrings(text: str) -> str:
    return "\n\n".join(" ".join(found.split()) for found in _DOCSTRING.findall(text))


def _files(first: str) -> Iterator[Path]:
    """Yield files of plain text, the library's file `first` first."""
    places = _places()
    start = places[0][0] / first
    if start.is_file():
        yield start
    for folder, pattern in places:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file() and path != start)


def _places() -> Sequence[tuple[Path, str]]:
    """Return folders with text, and which of their files: Python's library, then what else there may be."""
    library = Path(sysconfig.get_path("stdlib"))
    return (library, "*.py"), (_LICENCES, "*"), (Path(__file__).parent.parent, "*/*.py")


# ------------------------------------------------------------------ image


def png(side: int = IMAGE_SIDE) -> bytes:
    """Return a small picture: a sun over the sea, in a PNG of `side` pixels squared."""
    rows = b"".join(
        b"\0" + b"".join(bytes(_pixel(x / side, y / side)) for x in range(side)) for y in range(side)
    )
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _pixel(x: float, y: float) -> tuple[int, int, int]:
    if (x - 0.5) ** 2 + (y - 0.45) ** 2 < 0.03 and y < 0.6:
        return 255, 214, 90
    if y < 0.6:
        return 250 - int(120 * (0.6 - y)), 150 + int(60 * y), 110 + int(120 * y)
    return 20, 70 + int(60 * (1 - y)), 120 + int(80 * (1 - y))
