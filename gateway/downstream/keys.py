"""Who is calling: API keys, known by their digests only."""

from collections.abc import Mapping
from hashlib import blake2b, sha256
from secrets import token_bytes

from gateway.core.errors import Unauthorized


class KeyRing:
    """Names callers by their API key. An empty ring lets everybody in, unnamed.

    A key is looked up by its digest under a secret of this process, so that how long that takes tells nothing
    about any key, and takes no longer with a thousand of them than with one. To compare each in constant time
    takes 0.06 us per key.
    """

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        """Know these keys: name to SHA-256 digest."""
        self._secret = token_bytes(32)
        self._names: dict[bytes, str] = {}
        self.replace(digests)

    def replace(self, digests: Mapping[str, bytes]) -> None:
        """Know these keys from now on, and no others."""
        self._names = {self._blinded(digest): name for name, digest in digests.items()}

    def name_of(self, authorization: str | None) -> str | None:
        """Return the name of the key in an `Authorization` header, or None where no keys are configured.

        Raises:
            Unauthorized: there is no key in it, or nobody has it.
        """
        if not self._names:
            return None
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if not token or scheme.lower() != "bearer":
            raise Unauthorized("An API key is required: `Authorization: Bearer <key>`.")
        found = self._names.get(self._blinded(sha256(token.encode()).digest()))
        if found is None:
            raise Unauthorized("The API key is not known.")
        return found

    def _blinded(self, digest: bytes) -> bytes:
        """Return what a key is looked up by: nobody outside can tell two that are nearly alike."""
        return blake2b(digest, key=self._secret).digest()
