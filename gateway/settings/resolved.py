"""A validated configuration: the settings that `app.py` reads."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway import tcp
from gateway.core.box import BoxRules
from gateway.core.errors import ConfigError
from gateway.core.policy import Policy
from gateway.core.profile import EngineFlags, Profile
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.core.webhooks import WebhookEndpoint
from gateway.settings.addresses import Address, address, overlap
from gateway.settings.diff import LIVE
from gateway.settings.document import Document
from gateway.settings.named import Named
from gateway.settings.policies import policy_of
from gateway.settings.problems import Finding, Problem
from gateway.settings.secrets import SecretMissing, SecretRef, digest, read_headers, read_signing_keys
from gateway.settings.sections.service import StoreSection
from gateway.settings.sections.site_profiles import resolve
from gateway.settings.unmet import findings
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
        return self.named.file(self.document.boxes[name].launch_record)

    def box_token(self, name: str, member: str, environ: Mapping[str, str]) -> str | None:
        """Return the token for requests that start and stop a model, or None.

        Raises:
            ConfigError: the named secret does not exist.
        """
        return _read(self.named.box_token(name, member), f"box {name}, {member}", environ)

    # -------------------------------------------------------------- secrets and files

    @property
    def named(self) -> Named:
        """The secrets, files and folders that it names."""
        return Named(self.document, self.path.parent)

    def backend_key(self, backend_id: str, environ: Mapping[str, str]) -> str | None:
        """Return the API key for a backend, or None.

        Raises:
            ConfigError: the named secret does not exist.
        """
        return _read(self.named.backend_key(backend_id), f"backend {backend_id}", environ)

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
                digests[name] = digest(_read(self.named.key(name), f"key {name}", environ) or "")
        return digests

    def webhooks(self, environ: Mapping[str, str]) -> tuple[WebhookEndpoint, ...]:
        """Return the endpoints to notify when jobs end.

        Raises:
            ConfigError: a named secret does not exist, or is invalid.
        """
        endpoints = []
        for name, section in self.document.webhooks.items():
            try:
                secrets = read_signing_keys(self.named.webhook_secret(name), environ)
            except (SecretMissing, ValueError) as error:
                raise ConfigError(f"webhook {name}: {error}") from error
            keys = None if section.keys is None else frozenset(section.keys)
            endpoints.append(
                WebhookEndpoint(name, section.url, secrets, section.events, keys, section.allow_private)
            )
        return tuple(endpoints)

    def otlp_headers(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers for the OpenTelemetry receiver.

        Raises:
            ConfigError: the named secret does not exist, or is invalid.
        """
        try:
            return read_headers(self.named.otlp_headers, environ)
        except (SecretMissing, ValueError) as error:
            raise ConfigError(f"telemetry: {error}") from error

    def unmet(
        self, environ: Mapping[str, str], sections: Container[str] = Document.model_fields
    ) -> tuple[Problem, ...]:
        """Return everything these sections refer to that is missing or unusable on this machine: variables,
        key files, certificates, vocabulary, the folder of the decision log.

        These are warnings for `check`, which may run elsewhere; `serve` does not start with any of them.
        """
        found = (one for one in findings(self.named, environ) if one.path[0] in sections)
        return tuple(sorted(one.placed(str(self.path), self.tree) for one in found))

    def require(self, environ: Mapping[str, str], *, at_start: bool = True) -> None:
        """Check that everything the file refers to exists.

        `at_start`: also what is read only at startup. A running gateway has read that.

        Raises:
            ConfigError: lists everything that is missing.
        """
        if unmet := self.unmet(environ, Document.model_fields if at_start else LIVE):
            raise ConfigError("\n".join(str(problem) for problem in unmet))

    # -------------------------------------------------------------- messages

    def problem(self, path: TreePath, message: str, *, at_key: bool = False) -> Problem:
        """Return a problem at the position of `path` in the file."""
        return Finding(path, message, at_key=at_key).placed(str(self.path), self.tree)

    @property
    def summary(self) -> tuple[str, ...]:
        """A summary of the file in a few lines."""
        return tuple(_summary(self.document))


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
