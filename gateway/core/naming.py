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

    __slots__ = ("_member", "_public", "_seen", "_served")

    def __init__(self, served: str, public: str) -> None:
        """Show `public`, where the backend says `served` or, as one with several names may, another."""
        self._served, self._public = served, public
        self._member = _member(public)
        self._seen = _member(served)  # the member as it was written last

    def in_event(self, data: bytes) -> bytes:
        """Return one JSON object with its first `model` member renamed.

        No parsing: inside JSON text every quotation mark is escaped, so these bytes cannot be content.
        """
        start = data.find(b'"model"')
        if start < 0:
            return data
        if not data.startswith(self._seen, start):
            found = _MODEL.search(data, start)
            if found is None:
                return data
            start, self._seen = found.start(), found[0]
        if self._seen == self._member:
            return data
        return data[:start] + self._member + data[start + len(self._seen) :]

    def in_text(self, text: str) -> str:
        """Return a message for people with the name replaced, as a whole word."""
        return re.sub(rf"(?<![\w/.-]){re.escape(self._served)}(?![\w/-])", lambda _: self._public, text)
