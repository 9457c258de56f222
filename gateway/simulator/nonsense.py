"""What a model says that has come up wrong, on a wire that is in order."""

from dataclasses import replace

from gateway.simulator.options import Fault
from gateway.simulator.script import Script

_PIECE = "!"  # what broken weights say: the same token, over and over


def spoilt(script: Script, fault: Fault) -> Script:
    """Return what a choice becomes under a fault of `faults.NONSENSE`."""
    match fault:
        case Fault.CHANNEL_MARKERS:
            return _with_markers(script)
        case Fault.EMPTY_ANSWER:
            return Script([""])
        case _:
            return _repeated(script)


def _with_markers(script: Script) -> Script:
    """Return the script with its thought, or an empty one, in the content, markers and all."""
    tokens, end = list(script.tokens), script.thought_end
    if end == 0:
        tokens[0] = "<|channel>thought\n<channel|>" + tokens[0]
    else:
        tokens[0] = "<|channel>thought\n" + tokens[0]
        tokens[end - 1] += "<channel|>"
    return replace(script, tokens=tokens, thought_end=0)


def _repeated(script: Script) -> Script:
    """Return a script as long, of one piece alone; a tool call becomes text."""
    tokens = [_PIECE] * len(script.tokens)
    if script.finish_reason == "length":
        return Script(tokens, script.thought_end, finish_reason="length")
    tokens[-1] = ""  # the end token
    return Script(tokens, script.thought_end)
