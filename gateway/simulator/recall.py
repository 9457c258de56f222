"""What a simulated model gets right: to repeat a word, and to do a sum.

Everything else it answers in prose that means nothing. A caller that wants to know whether a server is
in its right mind has to ask for something that can be checked; these two kinds of question can.
"""

import re

_CHARS_MAX = 400
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


def asked_for(text: str) -> str | None:
    """Return the answer to a message that asks to repeat a word or to do a sum, and nothing else; or None."""
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
    return None
