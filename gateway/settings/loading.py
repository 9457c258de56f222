"""From a file to `Settings`, with every problem found on the way reported at once."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from gateway.core.errors import ConfigError
from gateway.settings import advice, references, resolved, shape
from gateway.settings.diff import AT_START, LIVE, held
from gateway.settings.document import Document
from gateway.settings.problems import Problem
from gateway.settings.references import Finding
from gateway.settings.resolved import Settings
from gateway.settings.yaml_tree import Tree, parse


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found.

    Attributes:
        problems: Errors, in the order of the file; the gateway does not start with one.
        warnings: What is legal and probably not meant, and what this machine lacks.
        summary: What the file says, in lines for a person; empty with problems.
        settings: The configuration, or None with problems.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()
    summary: tuple[str, ...] = ()
    settings: Settings | None = None

    @property
    def ok(self) -> bool:
        """Whether the gateway would start with this file, given what it names."""
        return not self.problems


def load(
    path: str | os.PathLike[str], environ: Mapping[str, str] | None = None, *, source: bytes | None = None
) -> Settings:
    """Return the configuration in a file; `${VAR}` is filled in from `environ`, the process's own by default.

    `source` is what the file said when somebody else read it; it is not read again then.

    Raises:
        ConfigError: the file cannot be used; every problem stands on a line of the message.
    """
    settings, problems = _read(Path(path), os.environ if environ is None else environ, source)
    if settings is None:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    return settings


def check(path: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> CheckReport:
    """Return what is wrong, doubtful and said in a configuration file. Raises nothing for what it holds."""
    surroundings = os.environ if environ is None else environ
    settings, problems = _read(Path(path), surroundings)
    if settings is None:
        return CheckReport(problems)
    warnings = tuple(sorted((*settings.warnings, *settings.unmet(surroundings))))
    return CheckReport((), warnings, settings.summary, settings)


def beside(started: Settings, running: Settings, new: Settings) -> Settings:
    """Return a configuration as far as it can take effect while one that was `started` runs.

    What is read at the start stays as it is running.

    Raises:
        ConfigError: that does not go together.
    """
    kept, wanted = started.tree.data, new.tree.data
    data = {name: value for name, value in wanted.items() if name in LIVE}
    data |= {name: kept[name] for name in AT_START if name in kept}
    data["backends"] = data["backends"] | {name: kept["backends"][name] for name in held(running.document)}
    try:
        document = Document.model_validate(data)
    except ValidationError as error:
        found = tuple(shape.findings(error))
    else:
        found = (*references.findings(data), *resolved.findings(document))
        if not found:
            own = {name: getattr(running.document, name) for name in AT_START}
            return replace(
                running,
                version=new.version,
                document=document.model_copy(update=own),
                tree=new.tree,
                source=new.source,
                warnings=new.warnings,
            )
    message = "together with settings that cannot change while the gateway runs: "
    raise ConfigError("\n".join(f"{'.'.join(map(str, one.path))}: {message}{one.message}" for one in found))


def _read(
    path: Path, environ: Mapping[str, str], source: bytes | None = None
) -> tuple[Settings | None, tuple[Problem, ...]]:
    try:
        raw = path.read_bytes() if source is None else source
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return None, (Problem(str(path), 0, 0, f"cannot be read: {error.strerror}"),)
    except UnicodeDecodeError as error:
        return None, (Problem(str(path), 0, 0, f"is not UTF-8 text (byte {error.start})"),)
    tree = parse(text, environ)
    problems = [Problem(str(path), mark.line, mark.column, message) for mark, message in tree.problems]
    if problems and tree.data is None:
        return None, tuple(problems)
    if not isinstance(tree.data, dict):
        return None, (*problems, Problem(str(path), 1, 1, "a configuration is a mapping of keys to values"))
    document, found = _validate(tree)
    found += tuple(references.findings(tree.data))
    if document is not None:
        found += tuple(resolved.findings(document))
    problems += [_placed(path, tree, finding) for finding in found]
    if document is None or problems:
        return None, tuple(sorted(set(problems)))
    settings = Settings(path, hashlib.sha256(raw).hexdigest()[:12], document, tree, raw)
    return replace(settings, warnings=advice.warnings(settings)), ()


def _validate(tree: Tree) -> tuple[Document | None, tuple[Finding, ...]]:
    try:
        return Document.model_validate(tree.data), ()
    except ValidationError as error:
        return None, tuple(shape.findings(error))


def _placed(path: Path, tree: Tree, finding: Finding) -> Problem:
    mark = tree.key_mark(finding.path) if finding.at_key else tree.value_mark(finding.path)
    return Problem(str(path), mark.line, mark.column, finding.message, finding.suggestion)
