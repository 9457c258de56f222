"""A request body taken apart into its members, and these decoded one by one. Each error names its member."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.value_limit import CONTAINERS_MAX, VALUES_MAX, is_crowded
from gateway.downstream import lone_surrogates
from gateway.downstream.cut_out import bytes_beside_media
from gateway.downstream.long_texts import TEXT_BYTES_MAX
from gateway.downstream.value_limit import may_be_crowded

MEMBERS_MAX = 512
"""Maximum members of a body. A choice: no engine has nearly as many."""

BOM = b"\xef\xbb\xbf"

# Created once: creating a decoder takes longer than decoding a short body.
_decode_members: Callable[[bytes], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=MEMBERS_MAX)]
).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def check_size(body: bytes) -> None:
    """Reject a body that, without its images and recordings, is longer than any text a model can read.

    Raises:
        BodyTooLarge: it is too long.
    """
    if len(body) > TEXT_BYTES_MAX and bytes_beside_media(body) > TEXT_BYTES_MAX:
        raise BodyTooLarge(
            f"Beside its images and recordings, the request body is larger than {TEXT_BYTES_MAX:,} bytes."
        )


def members_of(body: bytes, *, values_max: int = VALUES_MAX) -> dict[str, msgspec.Raw]:
    """Return the members of a request body as raw JSON.

    Raises:
        InvalidRequest: it is not a JSON object, or has more values than any model reads.
    """
    check_values(body, values_max)
    body = body.removeprefix(BOM)
    try:
        return _decode_members(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"The request body must be a JSON object of at most {MEMBERS_MAX} members."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        whole = lone_surrogates.replace_lone_surrogates(body)
        if whole is None:
            why = str(error) if body.strip() else "it is empty"
            message = f"The request body is not valid JSON: {why}."
            raise InvalidRequest(message, code="invalid_json") from error
    return members_of(whole, values_max=values_max)


def check_values(body: bytes, values_max: int = VALUES_MAX) -> None:
    """Reject a body with too many values, whose decoding would block the process.

    Raises:
        InvalidRequest: it has too many.
    """
    if may_be_crowded(body) and is_crowded(body, values_max):
        message = f"At most {CONTAINERS_MAX:,} objects and arrays and {values_max:,} values per request."
        raise InvalidRequest(message, code="too_many_items")


class Fields:
    """Typed access to single members. One of a wrong type raises InvalidRequest, which names it."""

    def __init__(self, members: Mapping[str, msgspec.Raw]) -> None:
        """Read these members."""
        self._members = members

    def raw(self, name: str) -> msgspec.Raw | None:
        """Return a member as raw JSON; None: it is missing, or null."""
        raw = self._members.get(name)
        return None if raw is None or bytes(memoryview(raw)[:5]) == b"null" else raw

    def any(self, name: str) -> Any:
        """Return a member of any type."""
        raw = self.raw(name)
        return None if raw is None else decoded(raw, name)

    def items(self, name: str, *, most: int) -> list[msgspec.Raw]:
        """Return the items of a required array as raw JSON."""
        raw = self.raw(name)
        if raw is None:
            raise InvalidRequest(f"`{name}` is required.", param=name)
        return items_of(raw, name, most)

    def text(self, name: str) -> str:
        """Return a string; "" if it is missing."""
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"`{name}` must be a string.", param=name)
        return value or ""

    def flag(self, name: str) -> bool:
        """Return a boolean; False if it is missing."""
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"`{name}` must be true or false.", param=name)
        return bool(value)

    def count(self, name: str, *, least: int) -> int | None:
        """Return an integer of at least `least`; None if it is missing."""
        return count_of(self.any(name), name, least)


def count_of(value: object, name: str, least: int) -> int | None:
    """Return the value of the member `name`, an integer of at least `least`, or None.

    Raises:
        InvalidRequest: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"`{name}` must be an integer of at least {least}.", param=name)
    return value


def decoded(raw: msgspec.Raw, name: str) -> Any:
    """Decode the member `name`.

    Raises:
        InvalidRequest: it is not JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"`{name}` is not valid JSON: {error}."
        raise InvalidRequest(message, code="invalid_json", param=name) from error


def items_of(raw: msgspec.Raw, name: str, most: int) -> list[msgspec.Raw]:
    """Return the items of the member `name`, an array of at most `most`, as raw JSON.

    Raises:
        InvalidRequest: it is something else.
    """
    try:
        items = _decode_items(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{name}` must be an array.", param=name) from error
    check_length(items, name, most)
    return items


def check_length(items: Sequence[object], name: str, most: int) -> None:
    """Reject the member `name`, an array, if it has more than `most` items.

    Raises:
        InvalidRequest: it has more.
    """
    if len(items) > most:
        raise InvalidRequest(f"`{name}` has more than {most} items.", code="too_many_items", param=name)


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return an object; an empty one in place of anything else, which the backend will report."""
    return value if isinstance(value, Mapping) else {}
