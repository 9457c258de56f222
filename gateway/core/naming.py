"""The two names of a model: the public one that applications send, and the one its backend uses."""

import json
import re
from functools import lru_cache

_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"')


@lru_cache(maxsize=256)
def _member(name: str) -> bytes:
    return b'"model":' + json.dumps(name).encode()


class ModelNames:
    """Replaces the backend's name for the model with the public one in answers and errors."""

    __slots__ = ("_member", "_public", "_seen", "_served")

    def __init__(self, served: str, public: str) -> None:
        """Replace `served`, or in `in_event` any other name that the backend sends, with `public`."""
        self._served, self._public = served, public
        self._member = _member(public)
        self._seen = _member(served)  # the member as the backend last wrote it

    def in_event(self, data: bytes) -> bytes:
        """Return one JSON object with its first `model` member renamed.

        This needs no parsing: quotation marks inside JSON strings are escaped, so the match is not in a text.
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

    def in_events(self, data: bytes) -> bytes | None:
        """Return the same for several events of a stream; None if they have to be renamed one by one.

        They do not if each has one `model` member, written like the last one that was seen.
        """
        members = data.count(self._seen)
        if members != data.count(b"\n\n") or members != data.count(b'"model"'):
            return None
        return data if self._seen == self._member else data.replace(self._seen, self._member)

    def in_text(self, text: str) -> str:
        """Return an error message with the served name replaced where it is a whole word."""
        return re.sub(rf"(?<![\w/.-]){re.escape(self._served)}(?![\w/-])", lambda _: self._public, text)
