"""Who is calling: API keys, known by their digests only."""

import hmac
from collections.abc import Mapping
from hashlib import sha256

from gateway.core.errors import Unauthorized


class KeyRing:
    """Names callers by their API key. An empty ring lets everybody in, unnamed."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        """Know these keys: name to SHA-256 digest."""
        self._digests = dict(digests)

    def replace(self, digests: Mapping[str, bytes]) -> None:
        """Know these keys from now on, and no others."""
        self._digests = dict(digests)

    def name_of(self, authorization: str | None) -> str | None:
        """Return the name of the key in an `Authorization` header, or None where no keys are configured.

        Every digest is compared, in constant time, so that timing tells nothing about any of them.

        Raises:
            Unauthorized: there is no key in it, or nobody has it.
        """
        if not self._digests:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("An API key is required: `Authorization: Bearer <key>`.")
        given = sha256(token.strip().encode()).digest()
        found = None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        if found is None:
            raise Unauthorized("The API key is not known.")
        return found
