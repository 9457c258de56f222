"""Every log line is about an event, and docs/logs.md says which, at which level, with which fields."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "logs.md").read_text()
# What simulates backends, and what shows the demo, is no part of a gateway in service.
SOURCES = [
    path
    for path in sorted((ROOT / "gateway").rglob("*.py"))
    if not {"simulator", "demo"} & set(path.relative_to(ROOT).parts)
]
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}


@dataclass
class Told:
    """How an event is told: a call of `log.log` chooses among levels, which is not read here."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    has_choice: bool = False


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of a logger: anything named `log` or `..._log`."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and re.fullmatch(r"(\w+_)?log", node.func.value.id)
                and node.func.attr in {*LEVELS, "log"}
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def extra_of(call: ast.Call) -> ast.Call | None:
    """Return the `about(...)` of a log call."""
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "extra" and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return value if value.func.id == "about" else None
    return None


def told() -> dict[str, Told]:
    events: dict[str, Told] = defaultdict(Told)
    for _, call in log_calls():
        extra = extra_of(call)
        if extra is None:
            continue
        name = ast.literal_eval(extra.args[0])
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr == "log":
            events[name].has_choice = True
        else:
            events[name].levels.add(LEVELS[call.func.attr])
        events[name].fields |= {keyword.arg for keyword in extra.keywords if keyword.arg is not None}
    return dict(events)


def documented() -> dict[str, tuple[list[str], list[str]]]:
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \|([a-z0-9_, ]*)\|", PAGE, re.M)
    return {
        name: (levels.split(", "), [one for one in fields.strip().split(", ") if one])
        for name, levels, fields in rows
    }


def test_every_line_is_about_an_event() -> None:
    calls = list(log_calls())
    mute = [where for where, call in calls if extra_of(call) is None]
    assert len(calls) > 40
    assert not mute, f"say what these lines are about, by extra=about(...): {mute}"


def test_every_event_is_documented_with_its_levels_and_fields_and_no_other() -> None:
    events, page = told(), documented()
    assert set(events) == set(page)
    for name, event in events.items():
        levels, fields = page[name]
        assert set(fields) == event.fields, name
        if event.has_choice:
            assert len(levels) > 1 and set(levels) >= event.levels, name
        else:
            assert set(levels) == event.levels, name


def test_the_fields_of_a_request_are_documented() -> None:
    module = ast.parse((ROOT / "gateway" / "telemetry" / "logs.py").read_text())
    functions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in {"request_fields", "_add_times"}
    ]
    literal = next(node for node in ast.walk(functions[0]) if isinstance(node, ast.Dict))
    keys = [ast.literal_eval(key) for key in literal.keys if key is not None]
    set_one_by_one = [
        node.slice
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    keys += [ast.literal_eval(key) for key in sorted(set_one_by_one, key=lambda one: one.lineno)]
    section = PAGE.partition("## Requests")[2].partition("## Events")[0]
    paragraph = section.strip().rpartition("\n\n")[2]
    names = re.findall(r"`(\w+)`", paragraph.replace("(`request`)", ""))
    assert names == keys
