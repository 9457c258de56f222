"""TLS to backends and stores, from the files that the configuration names."""

import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from gateway.core.value import valueclass
from gateway.settings.files import file_fault


@valueclass(frozen=True, slots=True)
class BackendTls:
    """TLS to a backend.

    Attributes:
        ca_file: Authorities that its certificate is verified against; None: the system's.
        verify: Whether it is verified at all.
        cert_file, key_file: The gateway's own certificate and its key; None: it has none, or the key is in
            `cert_file`.
    """

    ca_file: Path | None
    verify: bool
    cert_file: Path | None = None
    key_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that `context` reads."""
        authorities = self.ca_file if self.verify else None
        return tuple(file for file in (authorities, self.cert_file, self.key_file) if file is not None)

    def context(self) -> ssl.SSLContext:
        """Return a context with these settings.

        Raises:
            ValueError: a file is missing or unusable. The message names it.
        """
        authorities = self.ca_file if self.verify else None
        try:
            context = ssl.create_default_context(cafile=None if authorities is None else str(authorities))
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{authorities} holds no certificates: {error}") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            except (OSError, ssl.SSLError) as error:
                where = f"{self.cert_file} with {self.key_file}" if self.key_file else str(self.cert_file)
                raise ValueError(f"{where} is no certificate with its key: {error}") from error
            except ValueError as error:  # from `_no_password`
                raise ValueError(f"{self.key_file or self.cert_file}: {error}") from error
        return context


def _no_password() -> str:
    """Refuse an encrypted key: by default, OpenSSL would ask for its password on the terminal."""
    raise ValueError("its key is encrypted: decrypt it, for example with `openssl pkey`")


def tls_fault(tls: BackendTls) -> str:
    """Return what is wrong with the files of TLS settings; "" if they are usable or cannot all be read."""
    if not tls.files or any(map(file_fault, tls.files)):
        return ""
    try:
        tls.context()
    except ValueError as error:
        return str(error)
    return ""


def authority_faults(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the variables that name the system's authorities. OpenSSL does not say so."""
    if file := environ.get("SSL_CERT_FILE"):
        path = Path(file)
        if fault := file_fault(path) or tls_fault(BackendTls(path, True)):
            yield f"SSL_CERT_FILE: {fault}"
    folders = environ.get("SSL_CERT_DIR", "").split(os.pathsep)
    if any(folders) and not any(map(os.path.isdir, folders)):
        yield f"SSL_CERT_DIR: there is no folder {' or '.join(filter(None, folders))}"


def store_faults(url: str) -> Iterator[str]:
    """Yield what is wrong with the TLS files in the options of a store's URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query)) if parts.scheme == "rediss" else {}
    files = {
        option: Path(options[option])
        for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
        if option in options
    }
    for option, file in files.items():
        if fault := file_fault(file.absolute()):
            yield f"{option}: {fault}"
    own = BackendTls(None, True, files.get("ssl_certfile"), files.get("ssl_keyfile"))
    for tls in (BackendTls(files.get("ssl_ca_certs"), True), own):
        if "ssl_password" not in options and (fault := tls_fault(tls)):
            yield fault
