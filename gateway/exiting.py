"""Signals to a process, and its end."""

import faulthandler
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNAL = signal.SIGHUP

FAILURE, USAGE = 1, 2
"""Exit statuses: for what may pass, such as an address in use, and for what is wrong; click's, too."""

TOLD_S = 1.0
"""How long callers that are cut off have to read that they are. A choice: it delays every exit that cuts
callers off."""

STOP_S = 5.0
"""How long connections may take to close after their requests have ended or were cut off. A choice: slow
callers against the end of the process."""

EXIT_S = 10.0
"""How long the interpreter may take to exit once nothing is left to do. A choice: Python waits for threads
that may never end."""


DUMP_S = 5.0
"""How long it may then take to write where its threads are. A choice: its standard error may be full, and be
read by nobody."""


def hear_early_signals() -> None:
    """Ignore SIGHUP and exit on SIGTERM and SIGINT until the gateway handles signals, some seconds later.

    SIGHUP would end the process; it can be ignored, because the configuration is read after this anyway.
    SIGTERM would be lost for the first process of a container, which Linux exempts from signals without a
    handler: it would start, and serve until killed.
    """
    signal.signal(RELOAD_SIGNAL, signal.SIG_IGN)
    for stop in STOP_SIGNALS:
        signal.signal(stop, lambda *_: os._exit(0))  # nothing has been started yet


@contextmanager
def signals_heard() -> Iterator[tuple[AsyncIterator[signal.Signals], AsyncIterator[signal.Signals]]]:
    """Receive the signals to stop, and those to reload, during the block. Ignore both after it.

    Nothing is left to stop then, and the exit status is known. By default, one that comes before the process
    has exited, as from somebody who presses Ctrl-C again, would end it by that signal, or with a traceback.
    """
    import anyio  # not above: the program's first moments import this module

    try:
        with (
            anyio.open_signal_receiver(*STOP_SIGNALS) as stops,
            anyio.open_signal_receiver(RELOAD_SIGNAL) as hints,
        ):
            yield stops, hints
    finally:
        _ignore_signals()


def _ignore_signals() -> None:
    for late in (*STOP_SIGNALS, RELOAD_SIGNAL):
        signal.signal(late, signal.SIG_IGN)


@contextmanager
def bounded_exit() -> Iterator[None]:
    """Make sure that the process exits soon after the block, however the block ends.

    Python waits for every thread before it exits. A thread that never ends, because it died half way for lack
    of memory or waits for a disk, would keep a process that no longer serves from being restarted. After
    `EXIT_S` such a process writes where its threads are, and exits with status 1; `DUMP_S` later, if it could
    not be written, SIGALRM ends it.

    A signal to stop that arrives after the block no longer changes the exit status.
    """
    try:
        yield
    finally:
        _ignore_signals()
        with suppress(RuntimeError, OSError):  # no thread is left for it, or no standard error
            faulthandler.dump_traceback_later(EXIT_S, exit=True)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_S + DUMP_S)
