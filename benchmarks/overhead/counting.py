"""The token count alone, in a process of its own.

    python -m benchmarks.overhead.counting RANK_FILE BODY CALLS

Prints one line of JSON: the CPU of counting that chat's prompt, its tokens, the memory of the vocabulary.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.overhead import machine
from benchmarks.overhead.scenarios import renumbered
from gateway.core.values import Prompt, TemplateCosts, Turn
from gateway.tokenizer import open_estimator

LIMIT_TOKENS = 1_048_576


def main() -> None:
    """Count, every time another text, so that none is known from before."""
    vocabulary, body, calls = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), int(sys.argv[3])
    before_mb = machine.resident_mb({os.getpid()})
    estimator = open_estimator(vocabulary)
    held_mb = machine.resident_mb({os.getpid()}) - before_mb
    used_us = []
    tokens = 0
    for call in range(calls + 2):
        messages = json.loads(renumbered(body, 50_000_000 + call))["messages"]
        prompt = Prompt(turns=tuple(Turn(one["role"], (one["content"],)) for one in messages))
        began = time.process_time_ns()
        tokens = estimator.estimate_now(prompt, TemplateCosts(), LIMIT_TOKENS).tokens
        used_us.append((time.process_time_ns() - began) / 1000)
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
