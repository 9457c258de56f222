"""Memory that was freed is used again, unless the operator has a say in it."""

import os
import platform
import subprocess
import sys

import pytest

from gateway.memory import keep_freed

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc")

SCRIPT = """
import resource, os
from gateway.memory import keep_freed
is_kept = keep_freed(os.environ)


def pass_on():
    parts = [b"x" * 250_000 for _ in range(4)]
    body = b"".join(parts)
    del parts
    return len(b"".join((b"{", body.decode().encode(), b"}")))


for _ in range(5):
    pass_on()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    pass_on()
print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 1_000_000 // os.sysconf("SC_PAGESIZE")


def faults(**environ: str) -> tuple[str, int]:
    """Return what a process says, and how many pages it was given to pass on 20 bodies of 1 MB in turn."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env={**kept, **environ}, capture_output=True, text=True, check=True)
    said, count = done.stdout.split()
    return said, int(count)


def test_a_block_that_was_freed_is_used_again() -> None:
    said, count = faults()

    assert said == "True"
    assert count < 3 * PAGES


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}],
    ids=["a-variable", "tunables"],
)
def test_what_the_operator_has_set_is_all_there_is(environ: dict[str, str]) -> None:
    said, count = faults(**environ)

    assert said == "False"
    assert count > 10 * PAGES


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such(_: None) -> object:
        return object()

    monkeypatch.setattr("gateway.memory.ctypes.CDLL", no_such)

    assert keep_freed({}) is False


def test_what_is_there_at_the_start_is_not_looked_through_again() -> None:
    script = "import gc; from gateway.memory import settle; x = [[] for _ in range(1000)]; settle(); "
    script += "print(gc.get_freeze_count() > 1000, gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "10000"]


RETURNED = """
import os
from gateway.memory import keep_freed, settle


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


keep_freed({})
parts = [b"x" * 100_000 for _ in range(500)]
end = b"x" * 1_000  # what lies before it is not at the end of the heap
del parts
before = resident()
settle()
print(before - resident())
"""


def test_what_only_the_start_needed_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, check=True)

    assert int(done.stdout) > 40_000_000
