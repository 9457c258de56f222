"""A test run ends, also if one of its processes dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from support.scheduling import OneHeavyAtATime

def pytest_xdist_make_scheduler(config, log):
    return OneHeavyAtATime(config, log)
"""

TESTS = """
import os
from pathlib import Path

import pytest

@pytest.mark.parametrize("number", range(30))
def test_it(number):
    died = Path(__file__).with_name("died")
    if number == {dies} and not died.exists():
        died.touch()
        os._exit(1)
"""


@pytest.mark.parametrize("dies", [0, 15, 29])
def test_a_process_that_dies_fails_the_run_and_does_not_hold_it_up(tmp_path: Path, dies: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS.replace("{dies}", str(dies)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n2", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert f"crashed while running 'test_it.py::test_it[{dies}]'" in run.stdout
    assert {f"PASSED test_it.py::test_it[{number}]" for number in range(30)} <= set(run.stdout.splitlines())
