"""Memory settings: glibc keeps freed memory for the next request, and the garbage collector scans less.

glibc returns large blocks as soon as they are freed, and the kernel zeroes every page when they are needed
again. A long body is received, decoded and assembled in such blocks: five copies of 1 MB in sequence took
2.5 ms of CPU, and 0.17 ms with freed memory kept (one x86 core, glibc 2.36). This has the same effect as the
environment variables `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_`. docs/estimate.md#long-documents
says what it means for a request, and how much memory is kept.
"""

import ctypes
import gc
from collections.abc import Callable, Mapping

KEPT_BYTES = 256 * 1024 * 1024
"""Maximum free memory kept at the end of the heap. A choice: 64 documents of 4 MB. Free memory within it
always is."""

HEAP_BLOCK_BYTES = 32 * 1024 * 1024
"""Blocks up to this size are allocated on the heap: the size of the largest body, and glibc's maximum."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, by glibc's malloc.h."""

_OPERATORS = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Keep freed memory from now on, in all threads. Return whether that is in effect.

    It is not without glibc, or if the operator has set any of its variables, which apply then.
    """
    if any(name.startswith(_OPERATORS) for name in environ):
        return False
    mallopt = _in_libc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES))


def _in_libc(name: str) -> Callable[..., int] | None:
    """Return one of glibc's functions; None if this C library has none of that name."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found


YOUNG_MAX = 10_000
"""Number of allocations minus deallocations that triggers a garbage collection. A choice: Python's default,
700, is reached after two short requests."""

MIDDLE_AFTER, FULL_AFTER = 4, 150
"""So many collections of new objects before one of those that survived them, and so many of these before a
full one. The event loop stands still meanwhile, in a middle one the longer the more have survived: while
6,000 requests came to wait, for at most 22 ms; for 161 with 20 collections of 20,000 new objects (two cores
of an AMD EPYC, CPython 3.11)."""


def settle() -> None:
    """Exclude all existing objects from garbage collection: what was created at startup lives to the end.

    The collector's full rounds scanned some 200,000 objects, and took an eighth of a request's CPU. Memory
    that only the start needed is returned, above all what reading the vocabulary has freed.
    """
    gc.collect()
    if (trim := _in_libc("malloc_trim")) is not None:
        trim(0)
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, MIDDLE_AFTER, FULL_AFTER)
