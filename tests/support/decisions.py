"""A site whose policy is easy to bend, and lines of what it decided."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway.core.request import CountMode
from gateway.core.usage import Ending
from gateway.replay.comparing import Report
from gateway.replay.reading import Log
from gateway.settings import Settings
from gateway.telemetry import decision_lines
from gateway.telemetry.decision_lines import PromptLength, RequestLine

SITE: Mapping[str, Any] = {
    "tokenizer": "approximate",
    "backends": {
        "light-0": {"url": "http://10.0.0.1:8000", "profile": "h100-tp1-light"},
        "light-1": {"url": "http://10.0.0.2:8000", "profile": "h100-tp1-light"},
        "push": {"url": "http://10.0.0.3:8000", "profile": "h100-tp2-push"},
    },
    "pools": {"light": ["light-0", "light-1"], "push": ["push"]},
    "models": {
        "gemma-4": {
            "classes": [
                {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
                {"class": "short_chat", "pools": ["light", "push"]},
            ]
        }
    },
}

Configure = Callable[..., Settings]
Written = Callable[..., Path]
Logged = Callable[..., Log]


def classes(*sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `models` with these classes."""
    return {"gemma-4": {"classes": list(sections)}}


def line(at: float = 0.0, tokens: int = 1_000, output: int = 100, **fields: Any) -> RequestLine:
    """Return the line of a chat that was completed."""
    defaults: dict[str, Any] = {
        "v": decision_lines.VERSION,
        "ending": Ending.COMPLETED,
        "total_s": 2.0,
        "status": 200,
        "model": "gemma-4",
        "prompt": PromptLength(tokens, tokens + 16, CountMode.EXACT),
        "stream": True,
        "traffic_class": "long_document" if tokens >= 16_000 else "short_chat",
        "pool": "push" if tokens >= 16_000 else "light",
        "backend": "push" if tokens >= 16_000 else "light-0",
        "tries": 1,
        "wait_s": 0.0,
        "ttft_s": 0.5,
        "tokens_in": tokens,
        "tokens_out": output,
    }
    return RequestLine(at=at, **{**defaults, **fields})


def everywhere(**keys: Any) -> dict[str, Any]:
    """Return the section `backends` with these keys under each of them."""
    return {name: {**one, **keys} for name, one in SITE["backends"].items()}


def moves(report: Report) -> dict[str, dict[tuple[str, str], int]]:
    """Return how many requests moved from where to where, by what moved them."""
    return {
        what: {(one.before, one.after): one.requests for one in found}
        for what, found in report.moves.items()
        if found
    }
