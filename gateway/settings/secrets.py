"""Reads secrets. The configuration only names them; this is the only module that handles their values, and it
does not keep them."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from gateway.core.value import valueclass
from gateway.core.webhooks import read_secret
from gateway.settings.conditions import HEADER_NAME
from gateway.settings.files import read

_USUAL_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
"""How variables are named. Whatever looks otherwise may be the secret itself, in place of its name."""


class SecretMissing(Exception):
    """A named secret does not exist. The message contains its name, never a value."""


@valueclass(frozen=True, slots=True)
class SecretRef:
    """A reference to a secret: an environment variable or a file."""

    env: str | None = None
    file: Path | None = None

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the secret, without a trailing line break, or the byte order mark that some editors write.

        Raises:
            SecretMissing: the variable or regular file does not exist, is empty, or is not text.
        """
        if self.env is not None:
            secret = environ.get(self.env, "").strip()
            if not secret and not _USUAL_NAME.fullmatch(self.env):
                raise SecretMissing("there is no such environment variable: name one, not the secret itself")
            if not secret:
                raise SecretMissing(f"environment variable {self.env} is not set")
            if any("\ud800" <= char <= "\udfff" for char in secret):  # bytes that are not UTF-8
                raise SecretMissing(f"environment variable {self.env} is not text")
            return secret
        try:
            secret = read(self.file or Path()).decode("utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise SecretMissing(f"{self.file} cannot be read: {reason}") from error
        if not secret:
            raise SecretMissing(f"{self.file} is empty")
        return secret


def carried(secret: str) -> bool:
    """Return whether it is a valid value of an HTTP header."""
    return secret.isascii() and secret.isprintable()


def digest(secret: str) -> bytes:
    """Return the SHA-256 of a key, which is what the gateway stores and compares."""
    return hashlib.sha256(secret.encode()).digest()


def read_headers(secret: SecretRef | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers in a secret.

    Raises:
        SecretMissing: it does not exist.
        ValueError: it is invalid.
    """
    headers = {}
    for pair in () if secret is None else secret.read(environ).split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not HEADER_NAME.fullmatch(name.lower()) or not carried(value):
            raise ValueError("headers are written as name=value,name=value")
        headers[name] = value
    return headers


def read_signing_keys(secret: SecretRef, environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the keys in a secret, one or several.

    Raises:
        SecretMissing: it does not exist.
        ValueError: one is invalid.
    """
    return tuple(read_secret(one) for one in secret.read(environ).split())
