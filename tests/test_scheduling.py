"""A test run ends, also if one of its processes dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path

from support.scheduling import OneHeavyAtATime

def pytest_xdist_make_scheduler(config, log):
    return OneHeavyAtATime(config, log)

def pytest_unconfigure(config):
    if hasattr(config, "workerinput"):
        Path(__file__).with_name("ended").touch()
"""

TESTS = """
import os
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent

@pytest.mark.parametrize("number", range(30))
def test_it(number):
    died = HERE / "died"
    if number == {dies} and not died.exists():
        died.touch()
        while {alone} and not (HERE / "ended").exists():
            time.sleep(0.01)
        os._exit(1)
"""


def run_with_a_death(where: Path, dies: int, *, alone: bool) -> subprocess.CompletedProcess[str]:
    """Run thirty tests in two processes, one of which dies; ``alone``: after the other one has ended."""
    (where / "conftest.py").write_text(CONFTEST)
    (where / "test_it.py").write_text(TESTS.replace("{dies}", str(dies)).replace("{alone}", str(alone)))
    (where / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n2", "-rA", "-p", "no:cacheprovider"],
        cwd=where,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("alone", [False, True], ids=["beside another", "alone"])
@pytest.mark.parametrize("dies", [0, 15, 29])
def test_a_process_that_dies_fails_the_run_and_does_not_hold_it_up(
    tmp_path: Path, dies: int, alone: bool
) -> None:
    run = run_with_a_death(tmp_path, dies, alone=alone)
    assert run.returncode == 1
    assert f"crashed while running 'test_it.py::test_it[{dies}]'" in run.stdout
    assert {f"PASSED test_it.py::test_it[{number}]" for number in range(30)} <= set(run.stdout.splitlines())
