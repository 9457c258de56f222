"""The head of a chat that a connection repeats, recognized without parsing it again.

An application that keeps a connection sends the same head with every chat, except for its Content-Length. To
compare it with the previous one takes a few steps, to parse it several per header. A template is learned only
from a head that was parsed and accepted, and only if its bytes mean exactly what the parser read in them. It
recognizes a request only if its head has the same bytes, and if the received bytes are that request from its
first to its last. So it never decides where a request ends: in all other cases, that is the parser's task.
"""

from gateway.downstream.relay import Head
from gateway.ports import Headers

HEAD_BYTES_MAX = 8_192
"""Longer heads are always parsed. A choice: several times what SDKs send."""

_DIGITS_MAX = 7
"""Maximum digits of a Content-Length that is recognized. A choice: for a body of 10 MB or more, parsing its
head is nothing."""

_END = b"\r\n\r\n"
_LENGTH = b"content-length"


class HeadTemplate:
    """A head with any Content-Length.

    Attributes:
        head: The head from which it was learned.
    """

    __slots__ = ("_prefix", "_suffix", "head")

    def __init__(self, prefix: bytes, suffix: bytes, head: Head) -> None:
        """Recognize `prefix`, a number and `suffix`."""
        self._prefix, self._suffix = prefix, suffix
        self.head = head

    @classmethod
    def learned(cls, data: bytes, request_line: bytes, headers: Headers, head: Head) -> "HeadTemplate | None":
        """Return the template of the head at the beginning of `data`; None if it has to be parsed every time.

        `request_line`, `headers`: what the parser read in it.
        """
        end = data.find(_END, 0, HEAD_BYTES_MAX)
        first, *lines = data[: max(end, 0)].split(b"\r\n")
        if first != request_line or len(lines) != len(headers):
            return None
        at, size = len(first) + 2, 0
        for line, field in zip(lines, headers, strict=True):
            name, _, value = line.partition(b":")
            if (name.lower(), value.lstrip(b" \t")) != field:
                return None
            if field[0] == _LENGTH:
                if size or not field[1].isdigit():
                    return None
                prefix, size = data[: at + line.rindex(field[1])], len(field[1])
            at += len(line) + 2
        if not size:
            return None
        return cls(prefix, data[len(prefix) + size : end + len(_END)], head)

    def body_of(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Return the Content-Length, as written, and the body of a request; None if `data` is not one."""
        start = len(self._prefix)
        end = data.find(self._suffix, start, start + _DIGITS_MAX + len(self._suffix))
        if end < 0 or not data.startswith(self._prefix):
            return None
        length, body_at = data[start:end], end + len(self._suffix)
        if not length.isdigit() or int(length) != len(data) - body_at:
            return None
        return length, data[body_at:]
