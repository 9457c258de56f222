"""What a simulated model gets right: to repeat a word, to do a sum, and to count.

Everything else it answers in prose that means nothing. A caller that wants to know whether a server is
in its right mind has to ask for something that can be checked; these kinds of question can. To count takes
as long as one likes, and shows whether an answer is whole: a number that is missing, or there twice, is seen.
"""

import re

_CHARS_MAX = 400
_NUMBERS_MAX = 10_000
"""Longest question that is answered, and most numbers counted. Choices that bound the work."""

_REPEAT = re.compile(
    r"""(?:please\ )?(?:reply|answer|respond|say|repeat|write|return|output)\b [^"'`\n]{0,60}?
        (?:(?P<quote>["'`])(?P<quoted>[^"'`\n]{1,80})(?P=quote)
        |(?:\ (?:with|only|just|exactly|the|single|one|word|this|text)\b:?)+\ (?P<word>\w{1,40}))
        (?:\ and\ nothing\ else|\ only)?[.!]?""",
    re.IGNORECASE | re.VERBOSE,
)
_SUM = re.compile(
    r"""(?:what\ is|what's|calculate|compute|how\ much\ is) \ (?P<left>\d{1,9}) \ ?
        (?P<sign>[-+*\u00d7]|plus|minus|times) \ ?(?P<right>\d{1,9}) \ ?[?.=]{0,2} (?:\s[^\d\n]{0,80})?""",
    re.IGNORECASE | re.VERBOSE,
)
_COUNT = re.compile(r"(?:please )?count from (?P<first>\d{1,9}) to (?P<last>\d{1,9})[.!]?", re.IGNORECASE)


def asked_for(text: str) -> str | None:
    """Return the answer to a message that asks for what can be checked, and nothing else; or None."""
    text = text.strip()
    if len(text) > _CHARS_MAX:
        return None
    if repeat := _REPEAT.fullmatch(text):
        return repeat["quoted"] or repeat["word"]
    if asked := _SUM.fullmatch(text):
        left, right = int(asked["left"]), int(asked["right"])
        match asked["sign"].lower():
            case "+" | "plus":
                return str(left + right)
            case "-" | "minus":
                return str(left - right)
            case _:
                return str(left * right)
    if count := _COUNT.fullmatch(text):
        first, last = int(count["first"]), int(count["last"])
        return ", ".join(map(str, range(first, min(last + 1, first + _NUMBERS_MAX))))
    return None


def continued(text: str, so_far: str) -> str | None:
    """Return what is left of the answer to a message that has been begun; None where it begins otherwise."""
    whole = asked_for(text)
    return whole[len(so_far) :] if whole is not None and whole.startswith(so_far) else None
