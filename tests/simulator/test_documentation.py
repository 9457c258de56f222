"""docs/simulator.md names every fault and every quirk."""

from pathlib import Path

from gateway.simulator import Fault, Quirk

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def test_every_fault_is_documented_and_no_other() -> None:
    rows = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}

    assert rows == {fault.value for fault in Fault}


def test_every_quirk_is_named() -> None:
    assert all(f"`{quirk.value}`" in PAGE for quirk in Quirk)
