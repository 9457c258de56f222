"""A process exits, whatever its threads do."""

import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
import sys, threading
from gateway import __main__, exiting

exiting.EXIT_S = 0.2
if sys.argv[1] == "no thread":
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")
    exiting.faulthandler.dump_traceback_later = refuse
threading.Thread(target=threading.Event().wait, name="never ends").start()
sys.argv[1:] = ["serve", "--config", sys.argv[2]]
__main__.main()
"""


@pytest.mark.parametrize(("case", "status"), [("threads", 1), ("no thread", -14)])
def test_a_thread_that_never_ends_does_not_keep_the_process(case: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("backends: {}\n")
    command = [sys.executable, "-c", HANGING, case, str(tmp_path / "gateway.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "error: " in done.stderr
    assert done.returncode == status
    assert ("most recent call first" in done.stderr) is (status == 1)
