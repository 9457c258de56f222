"""The model's two names: the one applications send and the one a backend serves it under."""

import json
import re

_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"')


class ModelNames:
    """Shows the model by its public name in a backend's answers and errors, whatever the backend calls it."""

    __slots__ = ("_member", "_public", "_served")

    def __init__(self, served: str, public: str) -> None:
        """Show `public`, where the backend says `served` or, as one with several names may, another."""
        self._served, self._public = served, public
        self._member = b'"model":' + json.dumps(public).encode()

    def in_event(self, data: bytes) -> bytes:
        """Return one JSON object with its first `model` member renamed.

        No parsing: inside JSON text every quotation mark is escaped, so these bytes cannot be content.
        """
        return _MODEL.sub(lambda _: self._member, data, count=1)

    def in_text(self, text: str) -> str:
        """Return a message for people with the name replaced, as a whole word."""
        return re.sub(rf"(?<![\w/.-]){re.escape(self._served)}(?![\w/-])", lambda _: self._public, text)
