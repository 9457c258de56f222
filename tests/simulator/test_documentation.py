"""docs/simulator.md names every fault and every quirk."""

from pathlib import Path

from gateway.simulator import Boot, Fault, Quirk, State

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def test_every_fault_is_documented_and_no_other() -> None:
    rows = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}

    assert rows == {fault.value for fault in Fault}


def test_every_quirk_is_named() -> None:
    assert all(f"`{quirk.value}`" in PAGE for quirk in Quirk)


def test_every_state_of_a_model_and_every_end_of_a_boot_is_named() -> None:
    assert all(f"`{name.value}`" in PAGE for name in (*Boot, *State))
