"""A streaming parser for multipart forms: only short fields are kept in memory."""

from collections.abc import AsyncIterator, Iterator

import anyio
from litestar.types import Receive
from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from gateway.core.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from gateway.core.value import valueclass
from gateway.downstream.relay import CallerGone

FIELDS_MAX = 16
FIELD_BYTES_MAX = 4096
"""Maximum fields of a form, and bytes of each but the file. A choice: OpenAI's form has three short ones."""

PACE_BYTES_S = 16 * 1024
"""Minimum average rate of an upload: slower ones are aborted. A choice: a byte now and then is no upload."""


@valueclass(frozen=True, slots=True)
class Field:
    """A complete form field."""

    name: str
    value: str


@valueclass(frozen=True, slots=True)
class FileBegins:
    """The beginning of a file: the name of its field, and that which its sender gave it."""

    name: str
    filename: str


Part = Field | FileBegins | bytes
"""A part of a form; bytes belong to the latest file."""


async def parts_of(
    content_type: str, receive: Receive, within_s: float, bytes_max: int
) -> AsyncIterator[Part]:
    """Yield the parts of a form as they arrive.

    Args:
        content_type: The request's header.
        receive: The ASGI callable.
        within_s: Time limit per read, and grace period of the minimum average rate.
        bytes_max: Maximum size of the form, including what precedes its first part and follows its last one.

    Raises:
        InvalidRequest: it is not a valid form.
        BodyTooLarge: it is larger than that.
        RequestTimeout: data arrived too slowly.
        CallerGone: the caller disconnected.
    """
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise InvalidRequest("Send a form (`multipart/form-data`).", code="invalid_multipart")
    reader = _Reader(options["boundary"])
    begun, size = anyio.current_time(), 0
    more = True
    while more:
        with anyio.move_on_after(within_s) as limit:
            limit.deadline = min(limit.deadline, begun + within_s + size / PACE_BYTES_S)
            message = await receive()
        if limit.cancelled_caught:
            raise RequestTimeout(
                f"The upload stalled: nothing, or next to nothing, arrived for {within_s:g} s."
            )
        if message["type"] != "http.request":
            raise CallerGone
        more = message["more_body"]
        size += len(message["body"])
        if size > bytes_max:
            raise BodyTooLarge(f"The form is larger than {bytes_max:,} bytes.", code="file_too_large")
        for part in reader.feed(message["body"], is_last=not more):
            yield part


class _Reader:
    """Parses a form, and assembles fields that are not files."""

    def __init__(self, boundary: str) -> None:
        try:
            self._parser = PushMultipartParser(boundary, max_segment_count=FIELDS_MAX)
        except MultipartError as error:
            raise _no_form(error) from error
        self._name = ""
        self._value: bytearray | None = None  # None for a file

    def feed(self, data: bytes, *, is_last: bool) -> Iterator[Part]:
        try:
            if data:
                for event in self._parser.parse(data):
                    if (part := self._read(event)) is not None:
                        yield part
            if is_last:
                self._parser.close()
        except (MultipartError, UnicodeDecodeError) as error:
            raise _no_form(error) from error

    def _read(self, event: MultipartSegment | bytes | bytearray | None) -> Part | None:
        if event is None:
            value, self._value = self._value, None
            return None if value is None else Field(self._name, value.decode())
        if isinstance(event, MultipartSegment):
            self._name = event.name
            if event.filename is None:
                self._value = bytearray()
                return None
            return FileBegins(event.name, event.filename)
        if self._value is None:
            return bytes(event)
        self._value += event
        if len(self._value) > FIELD_BYTES_MAX:
            raise InvalidRequest(f"`{self._name[:64]}` is too long.", param=self._name[:64])
        return None


def _no_form(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"The form cannot be read: {error}.", code="invalid_multipart")
