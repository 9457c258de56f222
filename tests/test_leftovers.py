"""Nothing that a test run has started outlives it."""

import subprocess
import sys
from pathlib import Path

import anyio
from support.processes import descendants, wait_gone
from support.redis_server import legs

RUN = """
import subprocess, sys
from pathlib import Path
from support import leftovers
from support.redis_server import RedisServer, binary

leftovers.end_with_this_process()
for command in ("exec sleep 600", "env -i sleep 600 & wait"):
    print(subprocess.Popen(["sh", "-c", command], start_new_session=True).pid)
for leg in sys.argv[2:]:
    folder = Path(sys.argv[1], leg)
    folder.mkdir()
    server = RedisServer(binary(leg), folder)
    server.start()
    print(server.pid)
print("all", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_has_started_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), *legs(own=True)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        started = {int(line) for line in iter(run.stdout.readline, "all\n")}
        started |= {child for pid in started for child in descendants(pid)}
        assert len(started) == 3 + len(legs(own=True))
        run.kill()
    anyio.run(wait_gone, *started)
