"""The documentation says what the code says: error codes, metrics, and nothing that is not there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway import profiles
from gateway.clock import SystemClock
from gateway.core import errors
from gateway.core.decision import Exclusion
from gateway.core.errors import GatewayError
from gateway.core.health import Outcome
from gateway.core.quirks import WORKAROUNDS
from gateway.core.tpot_control import Move
from gateway.core.usage import Ending
from gateway.core.waiting import Reason
from gateway.downstream import config_routes, console_routes, explain_routes, guard, routes
from gateway.telemetry import gauges
from gateway.telemetry.job_metrics import JobMetrics
from gateway.telemetry.loop_watch import LoopWatch
from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[1]
MODULES = (errors, guard, routes, config_routes, console_routes, explain_routes)
SOURCES = sorted((ROOT / "gateway").rglob("*.py"))


def table(name: str) -> list[list[str]]:
    """Return the cells of every table row of a page, headings and rules left out."""
    lines = (ROOT / "docs" / name).read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if "`" in "".join(row)]


def raised_codes() -> Iterator[str]:
    """Yield every `code=` literal that gateway errors are made with, and every class's own code."""
    for source in SOURCES:
        if "simulator" in source.parts:
            continue  # a simulated backend speaks the engine's codes
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                        yield str(keyword.value.value)
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, GatewayError):
                yield kind.code


def test_every_error_code_is_documented_and_no_other() -> None:
    documented = {row[2].strip("`") for row in table("errors.md")}
    # A request that may not wait is told why by its code.
    reasons = {reason.value for reason in Reason} - {Reason.NO_BACKEND.value}

    assert documented == (set(raised_codes()) | reasons) - {"abort"}


def test_what_can_be_wrong_with_a_file_for_a_batch_is_documented() -> None:
    source = (ROOT / "gateway" / "core" / "batches.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    codes = {
        ast.literal_eval(call.args[0])
        for call in calls
        if ast.unparse(call.func) in ("_Bad", "self._refused") and isinstance(call.args[0], ast.Constant)
    }
    page = (ROOT / "docs" / "batches.md").read_text()
    assert codes
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_documented_statuses_are_those_of_the_code() -> None:
    kinds = [
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, GatewayError)
    ]
    rows = {row[2].strip("`"): row for row in table("errors.md")}
    for kind in kinds:
        if "code" not in vars(kind) or kind.code == "stream_broken":
            continue  # a branch of the tree, or an error without a status of its own
        assert (rows[kind.code][0], rows[kind.code][1]) == (str(kind.status), kind.type), kind


def all_metrics() -> CollectorRegistry:
    """Return every metric of a gateway that has seen nothing."""
    nothing = (
        "backends",
        "loads",
        "statuses",
        "drifts",
        "count_drifts",
        "snapshots",
        "waiting",
        "oldest_waits_s",
        "wait_limits_s",
        "wants",
        "boxes",
        "served",
        "objections",
        "connections",
        "store_modes",
    )
    metrics = Metrics()
    gauges.register(metrics.registry, replicas=int, dropped_lines=int, **dict.fromkeys(nothing, dict))
    JobMetrics(metrics.registry, lanes=tuple, snapshot=lambda: None, now=float)
    LoopWatch(metrics.registry, SystemClock())
    return metrics.registry


def plain(cell: str) -> str:
    """Return a cell of Markdown as it is read: without links and quotes."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def test_every_metric_is_documented_with_its_labels_and_its_help_and_no_other() -> None:
    registry = all_metrics()
    helps = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.documentation
        for family in registry.collect()
    }
    documented = {row[0].strip("`"): row for row in table("metrics.md")}

    assert set(documented) == set(helps)
    for name, text in helps.items():
        assert text.endswith("."), name
        meaning = plain(documented[name][3])
        assert (meaning[0].upper() + meaning[1:]).startswith(text.removesuffix(".")), name
    for name, collector in registry._names_to_collectors.items():
        labels = getattr(collector, "_labelnames", None)
        if labels is not None and name in documented:
            assert documented[name][2] == ", ".join(labels), name


def test_every_ending_outcome_and_reason_is_documented() -> None:
    values = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert {*Ending, *Outcome, *Exclusion} <= values


def test_every_outcome_of_the_control_loop_is_documented() -> None:
    assert {*Move} <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "knee.md").read_text()))


def test_every_workaround_is_documented_with_its_issue_and_no_other() -> None:
    documented = {row[0].strip("`"): row[1:3] for row in table("quirks.md")}
    assert documented == {name: [one.issue, one.versions] for name, one in WORKAROUNDS.items()}
    assert set(WORKAROUNDS) <= set(profiles.QUIRKS)


def test_every_row_of_a_table_has_a_head_and_as_many_cells() -> None:
    """Else it is shown as a line of text, or without its last cells."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before, cells, is_code = "", 0, False
        for line in page.read_text().splitlines():
            is_code ^= line.startswith("```")
            if line.startswith("|") and not is_code:
                found = len(re.findall(r"(?<!\\)\|", line))
                assert found == cells or not before.startswith("|"), f"{page.name}: {line}"
                if not before.startswith("|"):
                    is_head = True
                elif is_head:
                    assert not line.strip("|:- "), f"{page.name}: {before}"
                    is_head = False
                cells = found
            before = line


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if "://" not in target:
                file = page.parent / target if target else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_every_key_in_the_store_is_documented() -> None:
    """Names of keys of jobs, files and batches, as the scripts write them; `webhooks` builds its own."""
    scripts = (ROOT / "gateway" / "store").glob("*.lua")
    names = {name for script in scripts for name in re.findall(r"\bkey\('(\w+)'", script.read_text())}
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("store.md", "batches.md"))
    documented = set(re.findall(r"`(?:\{gw:jobs\}:)?(\w+)(?::[^`]*)?`", pages))
    assert names - documented == set()


def test_every_header_is_documented_and_no_other() -> None:
    pattern = re.compile(r"x-gateway-[a-z-]+")
    served = [path for path in SOURCES if path.parts[-2] in ("downstream", "pipeline")]
    sent = {name for path in served for name in pattern.findall(path.read_text())}
    assert set(pattern.findall((ROOT / "docs" / "headers.md").read_text())) == sent


def is_figure(value: ast.expr | None) -> bool:
    """Return whether an expression is a number, computed from one, or a row of them."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return is_figure(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), right=right):
            return is_figure(left) or is_figure(right)
        case ast.Tuple(elts=values):
            return any(map(is_figure, values))
    return False


def without_docstring(source: str) -> Iterator[str]:
    """Yield the module-level figures that are followed neither by a docstring nor by one that has it."""
    open_names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_figure(node.value):
            open_names.append(ast.unparse(node).partition(" = ")[0])
        else:
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                yield from open_names
            open_names.clear()
    yield from open_names


def test_every_figure_says_under_it_what_it_is_and_where_it_comes_from() -> None:
    assert [*without_docstring('A = 1\n"""It."""\nB = 2.0 * A\nC = "3"\nD = (4, 5)')] == ["B", "D"]
    missing = {str(path.relative_to(ROOT)): [*without_docstring(path.read_text())] for path in SOURCES}
    assert {path: names for path, names in missing.items() if names} == {}
