"""Parses YAML to plain data, and records the position of every value.

PyYAML drops positions when it constructs values, so the node tree is composed first and walked here: every
value and key keeps its position, duplicate keys are errors, `${VAR}` is substituted, and anchors and merge
keys work as usual, within limits.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gateway.core.value import valueclass

Path = tuple[str | int, ...]

_VALUES_MAX = 50_000
"""Maximum values of a file. A choice far above any real file: it limits the exponential expansion of
anchors."""

_DEPTH_MAX = 40
"""Maximum depth of a file. A choice: it stops an anchor that contains itself."""

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_OCTAL = re.compile(r"(?P<sign>[-+]?)0[0_]*(?P<digits>[1-7][0-7_]*)")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\}|\$\{")


@valueclass(frozen=True, slots=True)
class Mark:
    """A position in the file, 1-based."""

    line: int
    column: int


@dataclass(slots=True)
class Tree:
    """A parsed file.

    Attributes:
        data: The plain values.
        values, keys: Positions of each value, and of the key in front of it, by path.
        substituted: The values that name a variable, by path: what of them is in the file, defaults included.
        problems: `(mark, message)` of errors in the text itself.
    """

    data: Any = None
    values: dict[Path, Mark] = field(default_factory=dict)
    keys: dict[Path, Mark] = field(default_factory=dict)
    substituted: dict[Path, str] = field(default_factory=dict)
    problems: list[tuple[Mark, str]] = field(default_factory=list)

    def known(self, path: Path) -> Path:
        """Return the part of `path` that exists in the file.

        Other steps are left out: validation sees expanded short forms (`pools.light.backends.0`) that are not
        in the file (`pools.light.0`).
        """
        found: Path = ()
        for step in path:
            if (*found, step) in self.values:
                found = (*found, step)
        return found

    def value_mark(self, path: Path) -> Mark:
        """Return the position of the value at `path`, or of the nearest one above it."""
        return self.values.get(self.known(path), Mark(1, 1))

    def key_mark(self, path: Path) -> Mark:
        """Return the position of the key of `path`, or of the nearest one above it."""
        known = self.known(path)
        return self.keys.get(known) or self.values.get(known, Mark(1, 1))


class _TooMuch(Exception):
    """The text expands to more than any configuration."""


def parse(text: str, environ: Mapping[str, str]) -> Tree:
    """Parse a YAML text, with `${VAR}` substituted from `environ`. Never raises because of the text."""
    tree = Tree()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            tree.problems.append((Mark(1, 1), "the file is empty"))
        else:
            tree.data = _Builder(loader, tree, environ).build(node, ())
    except yaml.MarkedYAMLError as error:
        tree.problems.append((_mark(error.problem_mark), _what(error)))
    except yaml.reader.ReaderError as error:
        said = f"this is not YAML that can be used: the character U+{error.character:04X} is not allowed"
        tree.problems.append((_mark_at(text, error.position), said))
    except (yaml.YAMLError, _TooMuch, RecursionError, ValueError, OverflowError) as error:
        # The last two are raised by Python itself, for an escape of a character that does not exist.
        said = " ".join(str(error).split())  # some messages have several lines
        tree.problems.append((Mark(1, 1), f"this is not YAML that can be used: {said}"))
    return tree


class _Loader(yaml.SafeLoader):
    """Stops when there is more than a configuration can contain.

    Composing 7 MB of small values took 50 s and 950 MB, in a gateway that was serving (one x86 core).
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > 2 * _VALUES_MAX:  # each value has at most one key
            raise _TooMuch(f"it has more than {_VALUES_MAX:,} values")
        return super().compose_node(parent, index)


class _Builder:
    """Walks a node tree."""

    def __init__(self, loader: yaml.SafeLoader, tree: Tree, environ: Mapping[str, str]) -> None:
        self._loader = loader
        self._tree = tree
        self._environ = environ
        self._built = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._count(len(path))
        self._tree.values[path] = _mark(node.start_mark)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:  # of scalars, PyYAML says so
            self._complain(_mark(node.start_mark), "there are no tags here; leave out what begins with !")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if _VARIABLE.search(node.value):
            self._tree.substituted[path] = _VARIABLE.sub(_default, node.value)
        return self._scalar(node)

    def _complain(self, mark: Mark, message: str) -> None:
        self._tree.problems.append((mark, message))

    def _count(self, depth: int) -> None:
        self._built += 1
        if self._built > _VALUES_MAX or depth > _DEPTH_MAX:
            raise _TooMuch("it grows without end; look for an anchor that contains itself")

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        built: dict[str, Any] = {}
        merges: list[yaml.Node] = []
        for key, mark, value in self._entries(node, merges):
            self._tree.keys[(*path, key)] = mark
            built[key] = self.build(value, (*path, key))
        for merge in merges:
            for key, mark, value in self._merged(merge):
                if key not in built:
                    self._tree.keys[(*path, key)] = mark
                    built[key] = self.build(value, (*path, key))
        return built

    def _entries(
        self, node: yaml.MappingNode, merges: list[yaml.Node]
    ) -> Iterator[tuple[str, Mark, yaml.Node]]:
        """Yield the entries of a mapping, each key once; append what `<<` is to merge in to `merges`."""
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merges.append(value_node)
                continue
            mark = _mark(key_node.start_mark)
            key = self._key(key_node, mark)
            if key in first:
                self._complain(mark, f'"{key}" is given twice, first in line {first[key]}')
                continue
            first[key] = mark.line
            yield key, mark, value_node

    def _key(self, node: yaml.Node, mark: Mark) -> str:
        key = self._constructed(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            written = repr(node.value) if isinstance(node, yaml.ScalarNode) else "it"
            self._complain(mark, f"a key must be text; put {written} in quotes")
            key = str(node.value)
        return self._characters(key, mark)

    def _merged(self, node: yaml.Node, depth: int = 0) -> Iterator[tuple[str, Mark, yaml.Node]]:
        """Yield the entries that `<<: *anchor` (or a list of anchors) merges in, those that count first."""
        self._count(depth)
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self._complain(_mark(source.start_mark), "<< takes a mapping, or a list of them")
                continue
            inner: list[yaml.Node] = []
            for entry in self._entries(source, inner):
                self._count(depth)
                yield entry
            for one in inner:
                yield from self._merged(one, depth + 1)

    def _scalar(self, node: yaml.Node) -> Any:
        value = self._constructed(node)
        if type(value) in (int, float) and ":" in node.value:
            message = f"YAML takes {node.value} for base 60, which is {value}; write {value}, or quote a text"
            self._complain(_mark(node.start_mark), message)
        elif type(value) is int and (octal := _OCTAL.fullmatch(node.value)):
            plain = octal["sign"] + octal["digits"]
            message = f"YAML takes {node.value} for octal, which is {value}; write {plain} if that is meant"
            self._complain(_mark(node.start_mark), message)
        if isinstance(value, str) and "${" in value:
            value = _VARIABLE.sub(lambda match: self._variable(match, _mark(node.start_mark)), value)
        if isinstance(value, str):
            return self._characters(value, _mark(node.start_mark))
        return value

    def _characters(self, value: str, mark: Mark) -> str:
        """Join the two halves of characters that are escaped as JSON does it; others cannot be encoded."""
        if value.isascii():
            return value
        try:
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._complain(mark, "it contains bytes that are not UTF-8, or half a character")
            return ""

    def _constructed(self, node: yaml.Node) -> Any:
        """Construct a scalar. PyYAML does not catch Python's own errors for dates and numbers."""
        try:
            value = self._loader.construct_object(node, deep=True)
            if isinstance(value, int):
                str(value)  # a huge hexadecimal number cannot be formatted, for example in a message
            if isinstance(value, str) and "\0" in value:
                raise ValueError(r"no name, file or command can have \0 in it")
            if isinstance(value, bytes):
                raise ValueError("there are no binary values here")
            return value
        except IndexError:  # of an empty text that is tagged as a number
            self._complain(_mark(node.start_mark), "this is not a valid value: there is no number")
            return None
        except (ValueError, KeyError, OverflowError, AttributeError) as error:
            # The last one is raised for a text that is tagged as a date and is not one.
            why = "it is not a date" if isinstance(error, AttributeError) else error
            complaint = f"this is not a valid value: {why}; put text in quotes"
            self._complain(_mark(node.start_mark), complaint)
            return None

    def _variable(self, match: re.Match[str], mark: Mark) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$${":
            return "${"
        if name is None:
            message = "${ is no variable here; write ${NAME} or ${NAME:-default}, or $${ for ${ itself"
            self._complain(mark, message)
            return ""
        value = self._environ.get(name, "")
        if default is not None:
            return value or default.removeprefix(":-")
        if name not in self._environ:
            complaint = f"environment variable {name} is not set; ${{{name}:-default}} gives it a default"
            self._complain(mark, complaint)
        return value


def _default(match: re.Match[str]) -> str:
    """Return what a variable's place in the file says by itself: its default."""
    return match[0] if match["name"] is None else (match["default"] or "").removeprefix(":-")


def _mark(mark: yaml.Mark | None) -> Mark:
    return Mark(1, 1) if mark is None else Mark(mark.line + 1, mark.column + 1)


def _mark_at(text: str, index: int) -> Mark:
    """Return the position of the character at `index`."""
    before = text[:index]
    return Mark(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def _what(error: yaml.MarkedYAMLError) -> str:
    said = "; ".join(part for part in (error.context, error.problem) if part).replace("\n", " ")
    hint = next((hint for part, hint in _HINTS.items() if part in said), _unended(error))
    return f"{hint} ({said})" if hint else said


def _unended(error: yaml.MarkedYAMLError) -> str:
    """Return what has begun before an error and is not ended, with its line: often the mistake is there."""
    hint = _UNENDED.get(error.context or "", "")
    return f"{hint} in line {_mark(error.context_mark).line}" if hint else ""


_QUOTES = 'put this value in quotes, such as ">= 16000"'
"""What to do about a value that begins with a character of YAML's own."""

_INDENT = "this line is not indented like those before it"
"""What to do about a line that begins in another column than its neighbors."""

_HINTS = {
    "character '\\t'": "indent with spaces; this is a tab",
    "that cannot start any token": _QUOTES,
    "while scanning a block scalar": _QUOTES,
    "expected ',' or '}', but got '{'": 'put a value with braces in quotes, such as "${NAME}"',
    "found unknown escape character": "write a backslash twice, or put the value in single quotes",
    "expected alphabetic or numeric character": 'put this value in quotes, such as "*"',
    "could not determine a constructor": "put this value in quotes",
    "but found '<block mapping start>'": _INDENT,
    "but found '<block sequence start>'": _INDENT,
    "but found '-'": _INDENT,
    "but found '<scalar>'": "put the whole value in quotes, or check the indentation",
    "sequence entries are not allowed": "begin a list on a line of its own, or write it as [a, b]",
    "expected the node content": "a value is missing here, or has to be in quotes",
    "mapping values are not allowed": "put a value with a colon in quotes, or check the indentation",
}
"""What to do about errors of the YAML parser, by a part of its message."""

_UNENDED = {
    "while parsing a flow mapping": "a }, a comma or a quote is missing after the {",
    "while parsing a flow sequence": "a ], a comma or a quote is missing after the [",
    "while scanning a quoted scalar": "there is no end to the quote",
    "while scanning a simple key": "there is no colon, with a space behind it, after the key",
}
"""The same where nothing else is known, by what the parser was reading."""
