"""The benchmark that counts bytecodes: what it attributes to which function, and what it leaves out."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.steps import lines_of

ROOT = Path(__file__).resolve().parents[1]

COUNTED = """
import asyncio, sys
from pathlib import Path
from benchmarks.steps import Steps

async def inner():
    await asyncio.sleep(0)
    1 + 1

async def outer():
    await inner()

steps = Steps()
loop = asyncio.new_event_loop()
steps.begin()
for _ in range(3):
    loop.run_until_complete(outer())
steps.end(Path(sys.argv[1]))
loop.close()
"""


def test_a_coroutine_is_counted_within_the_one_that_awaits_it(tmp_path: Path) -> None:
    output = tmp_path / "steps"
    subprocess.run([sys.executable, "-c", COUNTED, str(output)], cwd=ROOT, check=True)
    calls = Counter[str]()
    for line in output.read_text().splitlines():
        bytecodes, called, path = line.split(" ", 2)
        names = [name.rpartition(" ")[2] for name in path.split("|")]
        if names[-1] in ("inner", "outer"):
            assert int(bytecodes) > 0
            calls["|".join(names[names.index("outer") :])] += int(called)
    # Each is entered twice: at its start, and when its sleep is over.
    assert calls == {"outer": 6, "outer|inner": 6}


def test_what_is_rare_is_left_out_of_the_tree_and_of_the_sum() -> None:
    bytecodes = Counter(
        {("a",): 100, ("a", "b"): 50, ("a", "batch"): 30, ("probe",): 500, ("probe", "c"): 40}
    )
    calls = Counter({("a",): 10, ("a", "b"): 20, ("a", "batch"): 1, ("probe",): 1, ("probe", "c"): 10})
    assert lines_of(bytecodes, calls, requests=10, least=1) == (
        [
            "with inner    itself   calls",
            "        18        10     1.0    a",
            "         5         5     2.0      b",
            "         3         3     0.1      batch",
            "         4         4     1.0      c",
            "22 bytecodes in 4 calls per request",
        ],
        22,
    )
