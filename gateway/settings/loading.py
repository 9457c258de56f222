"""Loads `Settings` from a file, and reports all problems at once."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.core.errors import ConfigError
from gateway.core.value import valueclass
from gateway.settings import advice, policies, references, shape
from gateway.settings.diff import AT_START, LIVE, LIVE_IF_HELD, awaiting, held, held_profiles
from gateway.settings.document import Document
from gateway.settings.problems import Finding, Problem
from gateway.settings.resolved import Settings
from gateway.settings.yaml_tree import Tree, parse


@valueclass(frozen=True, slots=True)
class CheckReport:
    """The result of `check`.

    Attributes:
        problems: Errors, in the order of the file; the gateway does not start with any of them.
        warnings: Valid settings that are probably mistakes, and `unmet`.
        unmet: What is missing or unusable in this environment: `serve` would not start in it.
        summary: A summary of the file; empty if there are problems.
        settings: The configuration; None if there are problems.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()
    unmet: tuple[Problem, ...] = ()
    summary: tuple[str, ...] = ()
    settings: Settings | None = None

    @property
    def ok(self) -> bool:
        """Whether the gateway would start with this file, provided that everything it refers to exists."""
        return not self.problems


def load(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] | None = None,
    *,
    source: bytes | None = None,
    name: str = "",
) -> Settings:
    """Load a configuration file; `${VAR}` is substituted from `environ`, by default the process's own.

    `source`: contents of the file, if it was read before; it is not read again then. `name`: what errors call
    the file, if those contents are from elsewhere.

    Raises:
        ConfigError: the file is invalid; the message has one line per problem.
    """
    settings, problems = _read(Path(path), os.environ if environ is None else environ, source, name)
    if settings is None:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    return settings


def check(path: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> CheckReport:
    """Check a configuration file. Never raises because of its contents."""
    surroundings = os.environ if environ is None else environ
    settings, problems = _read(Path(path), surroundings)
    if settings is None:
        return CheckReport(problems)
    unmet = settings.unmet(surroundings)
    warnings = tuple(sorted((*settings.warnings, *unmet)))
    return CheckReport((), warnings, unmet, settings.summary, settings)


def version_of(source: bytes) -> str:
    """Return the version of a configuration: a short hash of its file."""
    return hashlib.sha256(source).hexdigest()[:12]


def beside(started: Settings, running: Settings, new: Settings) -> Settings:
    """Return a new configuration as far as it can take effect at run time.

    Settings that are read only at startup keep their running values, even if they name an API key that is no
    longer there.

    Raises:
        ConfigError: the combination is invalid.
    """
    kept, wanted = started.tree.data, new.tree.data
    data = {name: value for name, value in wanted.items() if name in LIVE}
    data |= {name: kept[name] for name in AT_START if name in kept}
    data["backends"] = data["backends"] | {
        name: _held_back(kept["backends"][name], wanted["backends"].get(name))
        for name in held(running.document)
    }
    data["backends"] |= {
        name: {**data["backends"][name], "drain": True} for name in awaiting(running.document, new.document)
    }
    needed = held_profiles(running.document)
    profiles = {name: one for name, one in kept.get("profiles", {}).items() if name in needed}
    data["profiles"] = profiles | data.get("profiles", {})
    try:
        document = Document.model_validate(data)
    except ValidationError as error:
        found = tuple(shape.findings(error))
    else:
        both = (*references.findings(data), *policies.findings(document))
        found = tuple(one for one in both if one.path[0] not in AT_START)
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
    placed = (new.problem(one.path, f"{message}{one.message}", at_key=one.at_key) for one in found)
    raise ConfigError("\n".join(map(str, placed)))


def _held_back(section: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the section of a backend that cannot change at run time, with what can change of it."""
    if wanted is None:
        return section
    fixed = {key: value for key, value in section.items() if key not in LIVE_IF_HELD}
    return fixed | {key: value for key, value in wanted.items() if key in LIVE_IF_HELD}


def _read(
    path: Path, environ: Mapping[str, str], source: bytes | None = None, name: str = ""
) -> tuple[Settings | None, tuple[Problem, ...]]:
    name = name or str(path)
    try:
        raw = path.read_bytes() if source is None else source
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return None, (Problem(name, 0, 0, f"cannot be read: {error.strerror}"),)
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        return None, (Problem(name, 0, 0, f"is not UTF-8 text (byte {error.start}, in line {line})"),)
    tree = parse(text, environ)
    problems = [Problem(name, mark.line, mark.column, message) for mark, message in tree.problems]
    if problems and tree.data is None:
        return None, tuple(problems)
    if not isinstance(tree.data, dict):
        return None, (*problems, Problem(name, 1, 1, "a configuration is a mapping of keys to values"))
    document, found = _validate(tree)
    found += tuple(references.findings(tree.data))
    if document is not None:
        found += tuple(policies.findings(document))
    unread = {(mark.line, mark.column) for mark, _ in tree.problems}  # such a value is not what is meant
    placed = [finding.placed(name, tree) for finding in found]
    problems += [one for one in placed if (one.line, one.column) not in unread]
    if document is None or problems:
        return None, tuple(sorted(set(problems)))
    settings = Settings(path, version_of(raw), document, tree, raw)
    return replace(settings, warnings=advice.warnings(settings, environ)), ()


def _validate(tree: Tree) -> tuple[Document | None, tuple[Finding, ...]]:
    try:
        return Document.model_validate(tree.data), ()
    except ValidationError as error:
        return None, tuple(shape.findings(error))
