"""Runs a command until it ends or this process's standard input does: `embedded_watch.py FOLDER COMMAND...`.

Started beside the gateway with a pipe as standard input, whose other end only the gateway holds. The
pipe ends when the gateway does, whatever ended it, so that the command never outlives it. FOLDER, where it is
not empty text, was made for the command, and is removed once both have ended. Imports the standard library
alone: it is started by its path, in a moment.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

STOP_S = 3.0


def main(folder: str, command: list[str]) -> int:
    """Run the command, passing on what it says as far as somebody listens. Returns its exit status: 128 + N
    after signal N, 127 if it cannot be run."""
    os.set_blocking(1, False)  # a full pipe would stop the command
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            umask=0o077,  # it keeps prompts, in files that it would let everybody read
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
        with suppress(OSError):  # the gateway does so itself, if it still can
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
