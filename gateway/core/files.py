"""Files that callers hand over for batches, and those that batches leave. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PURPOSE_INPUT = "batch"
EXPIRES_MIN_S = 3_600
EXPIRES_MAX_S = 30 * 86_400
"""Between these a caller may choose how long a file is kept; OpenAI's limits."""

FILENAME_MAX = 255
"""Characters of a name that are kept."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to be uploaded.

    Attributes:
        id: `file-...`, unguessable.
        key: Name of the API key it belongs to, or None.
        filename: As the caller names it.
        purpose: What it is for.
    """

    id: str
    key: str | None
    filename: str
    purpose: str = PURPOSE_INPUT


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is there, whole.

    Attributes:
        new: What it was made as.
        size_bytes: How long it is.
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
    """Why bytes were not taken, or a file not forgotten. Few and fixed: error codes."""

    TOO_MANY_BYTES = "too_many_file_bytes"
    IN_USE = "file_in_use"


def file_object(file: StoredFile) -> Mapping[str, Any]:
    """Return a file as the API shows it."""
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
