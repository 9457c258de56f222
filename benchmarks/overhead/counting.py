"""The token count alone, in a process of its own.

    python -m benchmarks.overhead.counting RANK_FILE BODY CALLS

Prints one line of JSON: the CPU of counting that chat's prompt, its tokens, the memory of the vocabulary.
The prompt is read and counted by the gateway's own functions, and the clock runs within tiktoken alone
(clocked.py): the same pieces, and nothing around them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.overhead import clocked, machine
from benchmarks.overhead.scenarios import renumbered
from gateway import memory
from gateway.core.policy import TemplateCosts
from gateway.core.request import Endpoint
from gateway.downstream import wire
from gateway.downstream.reading import Received
from gateway.ports import Arrival
from gateway.tokenizer import open_estimator

LIMIT_TOKENS = 1_048_576


def main() -> None:
    """Count, every time another text, so that none is known from before."""
    vocabulary, body, calls = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        clock = clocked.made(Path(folder) / "clock")
        clocked.put_around_counts(clock)
        before_mb = machine.resident_mb({os.getpid()})
        estimator = open_estimator(vocabulary)
        memory.settle()  # as the gateway does, when it has started
        held_mb = machine.resident_mb({os.getpid()}) - before_mb
        used_us = []
        tokens = 0
        for call in range(calls + 2):
            another = renumbered(body, 50_000_000 + call).encode()
            received = Received(Arrival("", 0.0, 0.0), another, None, {}, ())
            read = wire.read(Endpoint.CHAT, received, wire.WireRules())
            began_s = clocked.read_s(clock)
            tokens = estimator.estimate_now(read.request.prompt, TemplateCosts(), LIMIT_TOKENS).tokens
            used_us.append(1e6 * (clocked.read_s(clock) - began_s))
    counted_us = sorted(used_us[2:])  # the first two also fill the caches
    print(
        json.dumps(
            {
                "count_us": counted_us[0],
                "count_median_us": counted_us[len(counted_us) // 2],
                "tokens": tokens,
                "vocabulary_mb": held_mb,
            }
        )
    )


if __name__ == "__main__":
    main()
