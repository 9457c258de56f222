"""The secrets, files and folders that a configuration names, by what they are for."""

from dataclasses import dataclass
from pathlib import Path

from gateway.settings.document import Document
from gateway.settings.secrets import SecretRef
from gateway.settings.tls import BackendTls


@dataclass(frozen=True, slots=True)
class Named:
    """What a configuration names.

    Attributes:
        document: The validated contents of its file.
        folder: The file's folder, to which paths in it are relative.
    """

    document: Document
    folder: Path

    # -------------------------------------------------------------- secrets

    def backend_key(self, backend_id: str) -> SecretRef | None:
        """Return the API key for a backend."""
        section = self.document.backends[backend_id]
        if section.api_key_env is None and section.api_key_file is None:
            return None
        return SecretRef(section.api_key_env, self.file(section.api_key_file))

    def box_token(self, name: str, member: str) -> SecretRef | None:
        """Return the token for requests that start and stop a model of a box."""
        http = self.document.boxes[name].backends[member].http
        return None if http is None or http.token_env is None else SecretRef(http.token_env)

    def key(self, name: str) -> SecretRef | None:
        """Return a caller's API key; None if only its hash is given, or there is none."""
        section = (self.document.keys or {}).get(name)
        if section is None or section.sha256 is not None:
            return None
        return SecretRef(section.env, self.file(section.file))

    def webhook_secret(self, name: str) -> SecretRef:
        """Return the signing keys of a webhook."""
        section = self.document.webhooks[name]
        return SecretRef(section.secret_env, self.file(section.secret_file))

    @property
    def otlp_headers(self) -> SecretRef | None:
        """The headers for the OpenTelemetry receiver."""
        otlp = self.document.telemetry.otlp
        return None if otlp is None or otlp.headers_env is None else SecretRef(otlp.headers_env)

    # -------------------------------------------------------------- files and folders

    def file(self, written: str | None) -> Path | None:
        """Return the path of a file or folder as it is written."""
        return None if written is None else self.folder / at_home(Path(written))

    @property
    def vocab(self) -> Path | None:
        """The vocabulary file."""
        return self.file(self.document.tokenizer.vocab)

    @property
    def jobs_folder(self) -> Path | None:
        """The data folder of an embedded store for jobs; None if none is needed."""
        if self.document.jobs is None or self.document.store is not None:
            return None
        return self.file(self.document.jobs.data_dir)

    @property
    def decisions_file(self) -> Path | None:
        """The file of the decision log."""
        return None if self.document.decisions is None else self.file(self.document.decisions.file)

    def tls(self, backend_id: str) -> BackendTls:
        """Return the TLS settings of a backend."""
        section = self.document.backends[backend_id].tls
        return BackendTls(
            self.file(section.ca_file),
            section.verify,
            self.file(section.cert_file),
            self.file(section.key_file),
        )


def at_home(path: Path) -> Path:
    """Expand `~` and `~user`, if known; otherwise return the path unchanged."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path
