"""A validated configuration: the settings that `app.py` reads."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway import tcp
from gateway.core.box import BoxRules
from gateway.core.errors import ConfigError
from gateway.core.policy import Policy
from gateway.core.profile import EngineFlags, Profile
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.core.webhooks import WebhookEndpoint, read_secret
from gateway.settings.addresses import Address, address, overlap
from gateway.settings.document import Document
from gateway.settings.files import file_fault
from gateway.settings.policies import policy_of
from gateway.settings.problems import Finding, Problem
from gateway.settings.secrets import SecretMissing, SecretRef, carried, digest
from gateway.settings.sections.service import StoreSection
from gateway.settings.sections.site_profiles import resolve
from gateway.settings.tls import BackendTls, store_faults, tls_fault
from gateway.settings.yaml_tree import Path as TreePath
from gateway.settings.yaml_tree import Tree


@dataclass(frozen=True, slots=True)
class Settings:
    """A valid configuration.

    Attributes:
        path: Its file; paths in it are relative to the file's folder.
        version: Short hash of the file.
        document: The validated contents.
        tree: The positions of all values in the file.
        source: The bytes of the file.
        warnings: Valid settings that are probably mistakes, as reported by `check`.
        workers: Number of processes on this machine that serve it together.
        jobs_url: The store for jobs, if the file names none and this process was given one.
        is_job_worker: Whether this process only runs jobs, without a listener for applications.
    """

    path: Path
    version: str
    document: Document
    tree: Tree = field(repr=False)
    source: bytes = field(repr=False)
    warnings: tuple[Problem, ...] = ()
    workers: int = 1
    jobs_url: str | None = field(default=None, repr=False)
    is_job_worker: bool = False

    # -------------------------------------------------------------- listeners and limits

    @property
    def listen(self) -> Address:
        """Address for applications."""
        return address(self.document.listen)

    @property
    def admin(self) -> Address | None:
        """Address for operators; None: none."""
        return None if self.document.admin is None else address(self.document.admin)

    @property
    def vocab(self) -> Path | None:
        """The vocabulary file; None if prompts are counted approximately."""
        return self._file(self.document.tokenizer.vocab)

    @property
    def jobs_folder(self) -> Path | None:
        """The data folder of an embedded store for jobs; None if none is needed."""
        if self.document.jobs is None or self.document.store is not None:
            return None
        return self._file(self.document.jobs.data_dir)

    def with_jobs_at(self, url: str) -> "Settings":
        """Return these settings with jobs stored at `url`, if the file names no store.

        If other processes run the jobs, limits are shared there too.
        """
        if self.document.jobs is not None and not self.document.jobs.work_in_serve:
            shared = self.document.model_copy(update={"store": StoreSection(url=url)})
            return replace(self, document=shared)
        return replace(self, jobs_url=url)

    @property
    def works_jobs(self) -> bool:
        """Whether this process runs jobs."""
        return self.document.jobs is not None and (self.is_job_worker or self.document.jobs.work_in_serve)

    def for_job_worker(self, admin: str | None) -> "Settings":
        """Return the settings of a process that only runs jobs, without a listener for applications.

        Args:
            admin: Address for operators in the file's notation; None: the file's own.

        Raises:
            ConfigError: there are no jobs, or limits would not be shared between processes.
        """
        if self.document.jobs is None:
            raise ConfigError(f"{self.path}: it has no `jobs`, so there is nothing for a worker to do")
        if self.document.store is None and self.document.jobs.work_in_serve:
            message = (
                "without a `store`, the process that serves counts slots on backends for itself alone, and a "
                "worker beside it would fill them twice: name a `store`, or write `work_in_serve: false`"
            )
            raise ConfigError(str(self.problem(("jobs",), message, at_key=True)))
        own = self.document if admin is None else self.document.model_copy(update={"admin": _admin(admin)})
        return replace(self, document=own, is_job_worker=True)

    @property
    def jobs_store(self) -> StoreSection | None:
        """The store for jobs; None without jobs."""
        if self.document.jobs is None:
            return None
        return self.document.store or (None if self.jobs_url is None else StoreSection(url=self.jobs_url))

    def for_worker(self, number: int, workers: int, store_url: str | None) -> "Settings":
        """Return the settings of one of several processes: its admin port is increased by `number`.

        Args:
            number: Its number, from 0. Port 0 is not changed.
            workers: Number of processes.
            store_url: The store for shared limits if the file names none.

        Raises:
            ConfigError: there is no such port, or it is that of `listen`.
        """
        own: dict[str, object] = {}
        if self.document.store is None and store_url is not None:
            own["store"] = StoreSection(url=store_url)
        if self.admin is not None and self.admin.port:
            port = self.admin.port + number
            if port > tcp.PORT_MAX:
                message = f"worker {number} would need admin port {port}: the highest port is {tcp.PORT_MAX}"
                raise ConfigError(str(self.problem(("admin",), message)))
            if overlap(Address(self.admin.host, port), self.listen):
                message = f"worker {number} would need admin port {port}, which is that of `listen`"
                raise ConfigError(str(self.problem(("admin",), message)))
            own["admin"] = tcp.address(self.admin.host, port)
        return replace(self, document=self.document.model_copy(update=own), workers=workers)

    # -------------------------------------------------------------- policy

    def policy(self) -> Policy:
        """Return the policy: everything that decides where a request goes."""
        return policy_of(self.document, self.version)

    def profile(self, backend_id: str) -> Profile:
        """Return the profile of a backend, including the site's own figures, but without its `limits`."""
        return resolve(self.document.profiles, self.document.backends[backend_id].profile)

    def engines(self) -> Mapping[str, EngineFlags]:
        """Return the launch flags of each backend's engine according to its profile."""
        return {name: self.profile(name).flags for name in self.document.backends}

    # -------------------------------------------------------------- boxes

    def box_members(self) -> Mapping[str, tuple[str, ...]]:
        """Return the backends of each box, which take turns on it."""
        return {name: tuple(box.backends) for name, box in self.document.boxes.items()}

    def box_rules(self, name: str, settle_s: float) -> BoxRules:
        """Return the rules for a box. `settle_s`: minimum drain time, so that other gateways notice it."""
        section = self.document.boxes[name]
        triggers = {member: Trigger(one.jobs, one.max_wait_s) for member, one in section.backends.items()}
        swaps = SwapRules(section.default, triggers, section.residency_s, section.idle_s)
        return BoxRules(swaps, section.boot_budget_s, settle_s)

    def box_boots_s(self) -> Mapping[str, float]:
        """Return the boot time of each model of a box according to its profile; 0 if it only wakes up."""
        return {
            name: 0.0 if one.sleep is not None else self.profile(name).boot_s or 0.0
            for box in self.document.boxes.values()
            for name, one in box.backends.items()
        }

    def launch_record(self, name: str) -> Path | None:
        """Return the file for the hashes of a box's launch commands, or None."""
        return self._file(self.document.boxes[name].launch_record)

    def box_token(self, name: str, member: str, environ: Mapping[str, str]) -> str | None:
        """Return the token for requests that start and stop a model, or None.

        Raises:
            ConfigError: the named secret does not exist.
        """
        http = self.document.boxes[name].backends[member].http
        secret = None if http is None or http.token_env is None else SecretRef(http.token_env)
        return _read(secret, f"box {name}, {member}", environ)

    # -------------------------------------------------------------- secrets

    def backend_key(self, backend_id: str, environ: Mapping[str, str]) -> str | None:
        """Return the API key for a backend, or None.

        Raises:
            ConfigError: the named secret does not exist.
        """
        return _read(self._backend_secret(backend_id), f"backend {backend_id}", environ)

    def key_digests(self, environ: Mapping[str, str]) -> Mapping[str, bytes] | None:
        """Return the SHA-256 of callers' keys by name; None if no keys are required.

        Raises:
            ConfigError: a named secret does not exist.
        """
        if self.document.keys is None:
            return None
        digests = {}
        for name, section in self.document.keys.items():
            if section.sha256 is not None:
                digests[name] = bytes.fromhex(section.sha256)
            else:
                secret = SecretRef(section.env, self._file(section.file))
                digests[name] = digest(_read(secret, f"key {name}", environ) or "")
        return digests

    def webhooks(self, environ: Mapping[str, str]) -> tuple[WebhookEndpoint, ...]:
        """Return the endpoints to notify when jobs end.

        Raises:
            ConfigError: a named secret does not exist, or is invalid.
        """
        endpoints = []
        for name, section in self.document.webhooks.items():
            try:
                secrets = _read_all(self._webhook_secret(name), environ)
            except (SecretMissing, ValueError) as error:
                raise ConfigError(f"webhook {name}: {error}") from error
            keys = None if section.keys is None else frozenset(section.keys)
            endpoints.append(
                WebhookEndpoint(name, section.url, secrets, section.events, keys, section.allow_private)
            )
        return tuple(endpoints)

    @property
    def decisions_file(self) -> Path | None:
        """The file of the decision log; None: no decision log."""
        return None if self.document.decisions is None else self._file(self.document.decisions.file)

    def otlp_headers(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers for the OpenTelemetry receiver.

        Raises:
            ConfigError: the named secret does not exist, or is invalid.
        """
        try:
            return _headers(self._otlp_secret(), environ)
        except (SecretMissing, ValueError) as error:
            raise ConfigError(f"telemetry: {error}") from error

    def _otlp_secret(self) -> SecretRef | None:
        otlp = self.document.telemetry.otlp
        return None if otlp is None or otlp.headers_env is None else SecretRef(otlp.headers_env)

    def tls(self, backend_id: str) -> BackendTls:
        """Return the TLS settings of a backend."""
        section = self.document.backends[backend_id].tls
        return BackendTls(
            self._file(section.ca_file),
            section.verify,
            self._file(section.cert_file),
            self._file(section.key_file),
        )

    def unmet(self, environ: Mapping[str, str]) -> tuple[Problem, ...]:
        """Return everything the file refers to that is missing or unusable on this machine: variables, key
        files, certificates, vocabulary, the folder of the decision log.

        These are warnings for `check`, which may run elsewhere; `serve` does not start with any of them.
        """
        return tuple(sorted(self._unmet(environ)))

    def require(self, environ: Mapping[str, str]) -> None:
        """Check that everything the file refers to exists.

        Raises:
            ConfigError: lists everything that is missing.
        """
        if unmet := self.unmet(environ):
            raise ConfigError("\n".join(str(problem) for problem in unmet))

    def _unmet(self, environ: Mapping[str, str]) -> Iterator[Problem]:
        for path, secret in self._secrets():
            try:
                found = secret.read(environ)
            except SecretMissing as error:
                yield self.problem(path, str(error))
            else:
                # A caller's key is only compared; but one with a line break, say, is in no request.
                if not (found.isprintable() if path[0] == "keys" else carried(found)):
                    where = secret.file or "it"
                    yield self.problem(path, f"{where} has a character that no header can carry")
        for name, section in self.document.webhooks.items():
            try:
                _read_all(self._webhook_secret(name), environ)
            except (SecretMissing, ValueError) as error:
                kind = "secret_file" if section.secret_env is None else "secret_env"
                yield self.problem(("webhooks", name, kind), str(error))
        try:
            _headers(self._otlp_secret(), environ)
        except (SecretMissing, ValueError) as error:
            yield self.problem(("telemetry", "otlp", "headers_env"), str(error))
        yield from self._unmet_files()

    def _unmet_files(self) -> Iterator[Problem]:
        for path, file in self._files():
            if fault := file_fault(file):
                is_to_make = path[0] == "tokenizer" and not os.path.exists(file)
                yield self.problem(
                    path, f"{fault}: `gemma-gateway vocab build` makes it" if is_to_make else fault
                )
        for name in self.document.backends:
            tls = self.tls(name)
            own = replace(tls, ca_file=None)
            for key, one in (("ca_file", replace(tls, cert_file=None, key_file=None)), ("cert_file", own)):
                if fault := tls_fault(one):
                    yield self.problem(("backends", name, "tls", key), fault)
        if self.document.store is not None:
            for fault in store_faults(self.document.store.url):
                yield self.problem(("store", "url"), fault)
        yield from self._unmet_folders()

    def _unmet_folders(self) -> Iterator[Problem]:
        jobs = self.document.jobs
        if self.jobs_folder is not None and jobs is not None:
            place = "jobs", "data_dir"
            if _is_homeless(jobs.data_dir):
                yield self.problem(place, f"there is no home directory {Path(jobs.data_dir).parts[0]}")
            elif os.path.exists(self.jobs_folder) and not os.path.isdir(self.jobs_folder):
                yield self.problem(place, f"{self.jobs_folder} is not a folder")
        if self.decisions_file is not None:
            place = "decisions", "file"
            if not os.path.isdir(self.decisions_file.parent):
                yield self.problem(place, f"there is no folder {self.decisions_file.parent}")
            elif os.path.isdir(self.decisions_file):
                yield self.problem(place, f"{self.decisions_file} is a folder")

    def _secrets(self) -> Iterator[tuple[TreePath, SecretRef]]:
        for name, backend in self.document.backends.items():
            secret = self._backend_secret(name)
            if secret is not None:
                yield (
                    ("backends", name, "api_key_file" if backend.api_key_env is None else "api_key_env"),
                    secret,
                )
        for name, box in self.document.boxes.items():
            for member, one in box.backends.items():
                if one.http is not None and one.http.token_env is not None:
                    path = ("boxes", name, "backends", member, "http", "token_env")
                    yield path, SecretRef(one.http.token_env)
        for name, key in (self.document.keys or {}).items():
            if key.sha256 is None:
                kind = "file" if key.env is None else "env"
                yield ("keys", name, kind), SecretRef(key.env, self._file(key.file))

    def _files(self) -> Iterator[tuple[TreePath, Path]]:
        if self.vocab is not None:
            yield ("tokenizer", "vocab"), self.vocab
        for name in self.document.backends:
            tls = self.tls(name)
            files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
            for key, file in files.items():
                if file is not None:
                    yield ("backends", name, "tls", key), file

    def _backend_secret(self, backend_id: str) -> SecretRef | None:
        section = self.document.backends[backend_id]
        if section.api_key_env is None and section.api_key_file is None:
            return None
        return SecretRef(section.api_key_env, self._file(section.api_key_file))

    def _webhook_secret(self, name: str) -> SecretRef:
        section = self.document.webhooks[name]
        return SecretRef(section.secret_env, self._file(section.secret_file))

    def _file(self, written: str | None) -> Path | None:
        return None if written is None else self.path.parent / _at_home(Path(written))

    # -------------------------------------------------------------- messages

    def problem(self, path: TreePath, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem at the position of `path` in the file."""
        return Finding(path, message, at_key=at_key).placed(str(self.path), self.tree)

    @property
    def summary(self) -> tuple[str, ...]:
        """A summary of the file in a few lines."""
        return tuple(_summary(self.document))


def _at_home(path: Path) -> Path:
    """Expand `~` and `~user`, if known; otherwise return the path unchanged."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _is_homeless(written: str) -> bool:
    return written.startswith("~") and _at_home(Path(written)) == Path(written)


def _admin(text: str) -> str | None:
    """Validate an address for operators. Raises ConfigError."""
    try:
        return None if text == "off" else tcp.address(*address(text))
    except ValueError as error:
        raise ConfigError(f"--admin: {error}") from error


def _read(secret: SecretRef | None, whose: str, environ: Mapping[str, str]) -> str | None:
    if secret is None:
        return None
    try:
        return secret.read(environ)
    except SecretMissing as error:
        raise ConfigError(f"{whose}: {error}") from error


def _headers(secret: SecretRef | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Parse the headers in a secret. Raises SecretMissing or ValueError."""
    headers = {}
    for pair in () if secret is None else secret.read(environ).split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not name or not equals or not (name + value).isascii() or not (name + value).isprintable():
            raise ValueError("headers are written as name=value,name=value")
        headers[name] = value
    return headers


def _read_all(secret: SecretRef, environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """Parse a secret with one or several keys. Raises SecretMissing or ValueError."""
    return tuple(read_secret(one) for one in secret.read(environ).split())


def _summary(document: Document) -> Iterator[str]:
    yield f"{_many(len(document.backends), 'backend')} in {_many(len(document.pools), 'pool')}"
    for pool, section in document.pools.items():
        yield f"  pool {pool}: " + ", ".join(
            f"{name} ({document.backends[name].profile}, {document.backends[name].url.partition('://')[2]})"
            for name in section.backends
        )
    for box, machine in document.boxes.items():
        yield f"box {box}: {', '.join(machine.backends)} take turns; {machine.default} by default"
    for model, policy in document.models.items():
        yield f"model {model}: {_many(len(policy.classes), 'class', 'classes')}, first match wins"
        for one in policy.classes:
            yield f"  {one.name} -> {', then '.join(one.pools)}"
    counting = "approximately" if document.tokenizer.vocab is None else "exactly"
    callers = "everyone" if document.keys is None else _many(len(document.keys), "API key")
    yield f"prompts are counted {counting}; open to {callers}"


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
