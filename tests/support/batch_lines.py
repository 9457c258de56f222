"""An input file read at once."""

from collections.abc import Iterable, Iterator

from gateway.core.batches import BatchLine, BatchLineError, InputReader, RawLine


def read_lines(lines: Iterable[bytes], endpoint: str) -> Iterator[BatchLine | BatchLineError]:
    """Yield the requests of an input file for `endpoint`, and an error for every line that is none."""
    reader = InputReader(endpoint)
    for number, data in enumerate(lines, start=1):
        found = reader.read(RawLine(number, data, 0))
        if found is not None:
            yield found
        if reader.is_over:
            return
    if (error := reader.end()) is not None:
        yield error
