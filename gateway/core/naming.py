"""The model's two names: the one applications send and the one a backend serves it under."""

import json


class ModelNames:
    """Replaces a backend's name for the model by the public one, in its answers and its errors."""

    __slots__ = ("_public", "_served", "_spellings")

    def __init__(self, served: str, public: str) -> None:
        """Replace `served` by `public`."""
        self._served, self._public = served, public
        old, new = json.dumps(served).encode(), json.dumps(public).encode()
        spellings = ((b'"model":' + old, b'"model":' + new), (b'"model": ' + old, b'"model": ' + new))
        self._spellings = () if old == new else spellings

    def in_json(self, data: bytes) -> bytes:
        """Return JSON bytes with the `model` member renamed.

        No parsing: inside JSON text every quotation mark is escaped, so these bytes cannot be content.
        """
        for old, new in self._spellings:
            data = data.replace(old, new)
        return data

    def in_text(self, text: str) -> str:
        """Return a message for people with the name replaced."""
        return text.replace(self._served, self._public) if self._spellings else text
