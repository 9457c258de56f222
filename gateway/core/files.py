"""Files: input and output of batches. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gateway.core.value import valueclass

PURPOSE_INPUT = "batch"
EXPIRES_MIN_S = 3_600
EXPIRES_MAX_S = 30 * 86_400
"""The range of expiry times a caller may choose; OpenAI's limits."""

FILENAME_MAX = 255
"""Maximum characters of a stored filename. A choice: what common file systems allow."""


@valueclass(frozen=True, slots=True)
class NewFile:
    """A file to be uploaded.

    Attributes:
        id: `file-...`, unguessable.
        key: Name of its API key, or None.
        filename: Name chosen by the caller.
        purpose: Its purpose.
    """

    id: str
    key: str | None
    filename: str
    purpose: str = PURPOSE_INPUT


@valueclass(frozen=True, slots=True)
class StoredFile:
    """A complete file in the store.

    Attributes:
        new: Its metadata from the upload.
        size_bytes: Its size.
        created_at, expires_at: Epoch seconds of the store's clock.
    """

    new: NewFile
    size_bytes: int
    created_at: int
    expires_at: int

    @property
    def id(self) -> str:
        """Its id."""
        return self.new.id


class FileRefusal(StrEnum):
    """Why an upload or a deletion was refused. A closed set: error codes."""

    TOO_MANY_BYTES = "too_many_file_bytes"
    IN_USE = "file_in_use"


def file_object(file: StoredFile) -> Mapping[str, Any]:
    """Return the API's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.new.filename,
        "purpose": file.new.purpose,
        "status": "processed",
        "status_details": None,
    }
