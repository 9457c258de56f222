"""The model's two names: the one applications send and the one a backend serves it under."""

import json
import re
from functools import lru_cache

_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"')


@lru_cache(maxsize=256)
def _member(name: str) -> bytes:
    return b'"model":' + json.dumps(name).encode()


class ModelNames:
    """Shows the model by its public name in a backend's answers and errors, whatever the backend calls it."""

    __slots__ = ("_member", "_public", "_served")

    def __init__(self, served: str, public: str) -> None:
        """Show `public`, where the backend says `served` or, as one with several names may, another."""
        self._served, self._public = served, public
        self._member = _member(public)

    def in_event(self, data: bytes) -> bytes:
        """Return one JSON object with its first `model` member renamed.

        No parsing: inside JSON text every quotation mark is escaped, so these bytes cannot be content.
        """
        found = _MODEL.search(data)
        return data if found is None else data[: found.start()] + self._member + data[found.end() :]

    def in_text(self, text: str) -> str:
        """Return a message for people with the name replaced, as a whole word."""
        return re.sub(rf"(?<![\w/.-]){re.escape(self._served)}(?![\w/-])", lambda _: self._public, text)
