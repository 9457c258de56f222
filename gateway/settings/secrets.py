"""Where secrets are read from. The configuration names them; only this module holds one, and only to
hand it on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class SecretMissing(Exception):
    """A named secret is not there. The message names it and never holds one."""


@dataclass(frozen=True, slots=True)
class SecretRef:
    """The place of a secret: an environment variable or a file."""

    env: str | None = None
    file: Path | None = None

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the secret, without the line end that files are written with.

        Raises:
            SecretMissing: there is no such variable or file, or it is empty, or not text.
        """
        if self.env is not None:
            secret = environ.get(self.env, "").strip()
            if not secret:
                raise SecretMissing(f"environment variable {self.env} is not set")
            if any("\ud800" <= char <= "\udfff" for char in secret):  # bytes that are not UTF-8
                raise SecretMissing(f"environment variable {self.env} is not text")
            return secret
        try:
            secret = (self.file or Path()).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise SecretMissing(f"{self.file} cannot be read: {reason}") from error
        if not secret:
            raise SecretMissing(f"{self.file} is empty")
        return secret


def carried(secret: str) -> bool:
    """Return whether an HTTP header can carry it."""
    return secret.isascii() and secret.isprintable()


def digest(secret: str) -> bytes:
    """Return the SHA-256 of a key: what the gateway keeps and compares."""
    return hashlib.sha256(secret.encode()).digest()
