"""A process exits, whatever its threads do, and hears signals from its first moment."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import lonely_config

HANGING = """
import os, sys, threading
from gateway import __main__, exiting

exiting.EXIT_S = 0.2
if sys.argv[1] == "no reader":
    unread, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while True:
            os.write(full, bytes(4096))
    except BlockingIOError:
        os.set_blocking(full, True)
    os.dup2(full, 2)
if sys.argv[1] == "no thread":
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")
    exiting.faulthandler.dump_traceback_later = refuse
threading.Thread(target=threading.Event().wait, name="never ends").start()
sys.argv[1:] = ["serve", "--config", sys.argv[2]]
__main__.main()
"""


@pytest.mark.parametrize(("case", "status"), [("threads", 1), ("no thread", -14), ("no reader", -14)])
def test_a_thread_that_never_ends_does_not_keep_the_process(case: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("backends: {}\n")
    command = [sys.executable, "-c", HANGING, case, str(tmp_path / "gateway.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert ("error: " in done.stderr) is (case != "no reader")
    assert ("most recent call first" in done.stderr) is (status == 1)


LOADING = """
import os, sys

class Signalling:
    def find_spec(self, name, *_):
        if name == "gateway.cli":  # its program is being loaded
            os.kill(os.getpid(), signal_number)

signal_number = int(sys.argv.pop())
sys.meta_path.insert(0, Signalling())
from gateway import __main__
__main__.main()
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 2), (signal.SIGTERM, 0), (signal.SIGINT, 0)], ids=str
)
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_signal_is_heard_while_the_program_is_being_loaded(
    command: str, number: int, status: int, tmp_path: Path
) -> None:
    missing = str(tmp_path / "gateway.yaml")  # so status 2 says that it went on
    arguments = [command, "--config", missing, str(int(number))]
    done = subprocess.run([sys.executable, "-c", LOADING, *arguments], capture_output=True, timeout=60)
    assert done.returncode == status


ENDED = """
import os, signal
import anyio
from gateway import __main__

run = anyio.run

def signalled(*arguments, **options):
    try:
        return run(*arguments, **options)
    finally:  # the program is about to exit
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

anyio.run = signalled
__main__.main()
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_signals_that_come_once_all_is_stopped_change_nothing(workers: str, tmp_path: Path) -> None:
    arguments = ["serve", str(lonely_config(tmp_path)), "--workers", workers]
    with subprocess.Popen(
        [sys.executable, "-c", ENDED, *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        before = next(line for line in process.stderr if " serves http" in line)
        process.send_signal(signal.SIGTERM)
        said = before + process.stderr.read()
    assert process.returncode == 0, said
    assert "Traceback" not in said
