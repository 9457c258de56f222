"""Runs a command until it exits, or standard input reaches EOF: `embedded_watch.py FOLDER COMMAND...`.

The gateway starts this with a pipe as standard input, and holds the only write end. So the pipe is closed
when the gateway ends for any reason, and the command never outlives it. FOLDER, unless empty, is a temporary
folder that is removed at the end. Imports only the standard library, because it is started by path and must
start quickly.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

STOP_S = 3.0
"""How long the server may take to stop before it is killed. A choice: it syncs its file."""


def main(folder: str, command: list[str]) -> int:
    """Run the command, pass on its output, and return its exit status.

    The status is 128 + N after signal N, and 127 if the command cannot be run.
    """
    os.set_blocking(1, False)  # a full pipe must not block the command
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            umask=0o077,  # its files contain prompts, and would be world-readable
        )
    except OSError as error:
        os.write(1, f"{command[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
        return 127
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    is_alone = threading.Event()
    threading.Thread(target=_end_with_input, args=(process, is_alone), daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        with suppress(OSError):
            os.write(1, line)
    status = process.wait()
    if folder and is_alone.is_set():
        with suppress(OSError):  # the gateway removes it itself, if it can
            os.rmdir(folder)
    return status if status >= 0 else 128 - status


def _end_with_input(process: "subprocess.Popen[bytes]", is_alone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    is_alone.set()
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
