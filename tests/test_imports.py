"""Who may import whom, read from pyproject.toml; and what importing the gateway must not do.

The contracts are import-linter's. This holds the same ones without the tool, so that `pytest` alone
notices a broken one.
"""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.settings.fields import Section
from gateway.settings.sections.site_profiles import Sourced

ROOT = Path(__file__).parents[1]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "tool"
]["importlinter"]["contracts"]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@cache
def modules() -> dict[str, Path]:
    names = {}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports(module: str) -> frozenset[str]:
    """Return what a module imports, at its top or inside a function; of submodules, the submodule."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in modules() else node.module for name in full)
    return frozenset(found)


def reached(package: str) -> Iterator[tuple[str, str]]:
    """Yield (importer, imported) for all that a package leads to through the gateway's own modules."""
    queue = [name for name in modules() if within(name, package)]
    seen = set(queue)
    while queue:
        importer = queue.pop()
        for imported in imports(importer):
            yield importer, imported
            if imported in modules() and imported not in seen:
                seen.add(imported)
                queue.append(imported)


LAYERS = [contract for contract in CONTRACTS if contract["type"] == "layers"]
FORBIDDEN = [contract for contract in CONTRACTS if contract["type"] == "forbidden"]


@pytest.mark.parametrize("contract", LAYERS, ids=lambda contract: contract["name"])
def test_layers_import_downwards_only(contract: dict[str, Any]) -> None:
    rows = [[name.strip(" ()") for name in row.split("|")] for row in contract["layers"]]
    place = {package: level for level, row in enumerate(rows) for package in row}

    def home(module: str) -> str | None:
        return next((package for package in place if within(module, package)), None)

    wrong = [
        f"{importer} imports {imported}"
        for importer in modules()
        for imported in imports(importer)
        for upper, lower in [(home(imported), home(importer))]
        if upper is not None and lower is not None and upper != lower and place[upper] <= place[lower]
    ]
    assert wrong == []


@pytest.mark.parametrize("contract", FORBIDDEN, ids=lambda contract: contract["name"])
def test_what_is_forbidden_is_not_reached(contract: dict[str, Any]) -> None:
    wrong = [
        f"{importer} imports {imported}, and {source} leads there"
        for source in contract["source_modules"]
        for importer, imported in reached(source)
        if any(within(imported, forbidden) for forbidden in contract["forbidden_modules"])
        and f"{importer} -> {imported}" not in contract.get("ignore_imports", ())
    ]
    assert wrong == []


def test_every_module_has_its_layer() -> None:
    layered = [name.strip(" ()") for row in LAYERS[0]["layers"] for name in row.split("|")]
    top = {name for name in modules() if name.count(".") == 1}
    assert top - set(layered) == {"gateway.clock"}  # imports nothing of ours, and only app.py imports it


IMPORTING = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
import {module}
print(json.dumps({{"opened": opened, "loaded": sorted(sys.modules)}}))
"""


@pytest.mark.parametrize("module", ["gateway.cli", "gateway.app"])
def test_importing_opens_no_socket_and_loads_nothing_that_only_some_need(module: str) -> None:
    # -I: what is imported is what is installed, not what the current directory happens to hold.
    command = [sys.executable, "-I", "-c", IMPORTING.format(module=module)]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert seen["opened"] == []
    unwanted = {"httpx", "openai", "opentelemetry", "redis", "tokenizers"}
    unwanted |= {"gateway.demo", "gateway.simulator"}
    assert unwanted.isdisjoint(seen["loaded"])


def test_a_process_that_supervises_others_loads_no_gateway() -> None:
    command = [sys.executable, "-c", IMPORTING.format(module="gateway.process")]
    seen = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert {"gateway.app", "litestar", "tiktoken", "httpx"}.isdisjoint(seen["loaded"])


def test_what_a_test_starts_keeps_what_it_compiles(pytestconfig: pytest.Config) -> None:
    if not hasattr(pytestconfig, "cache"):
        pytest.skip("there is no place for it")
    command = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_no_section_is_searched_for_docstrings() -> None:
    # Pydantic would read its source for each, and for kinds of figures look through every module.
    sections = [*Section.__subclasses__(), *Sourced.__subclasses__()]
    assert len(sections) > 60
    assert [one for one in sections if one.model_config.get("use_attribute_docstrings")] == []
