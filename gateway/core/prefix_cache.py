"""The prefix cache of an engine: which blocks of prompts it has kept, and which it gives up first. Pure.

As vLLM's: a prompt is cut into blocks, each known by a key that stands for everything up to its end. What a
sequence has computed is kept when it ends, in the KV blocks that nobody needs, and the least recently used
goes first when somebody does; of one prompt, its end before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 128
"""Tokens per block: of a repeated prompt of 613 tokens, vLLM 0.32 found 512 with Gemma 4."""

KEPT_MAX = 65_536
"""Maximum blocks that no sequence uses. A choice that bounds memory: 8 million tokens, where a server of two
H100 holds some 0.4 million."""


class PrefixCache:
    """See the module."""

    __slots__ = ("_kept", "_kept_kv", "_used")

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # number of sequences by key
        self._kept: OrderedDict[int, float] = OrderedDict()  # KV blocks by key, the next to go first
        self._kept_kv = 0.0

    def found(self, keys: Sequence[int]) -> int:
        """Return how many blocks from the beginning on it has."""
        for index, key in enumerate(keys):
            if key not in self._used and key not in self._kept:
                return index
        return len(keys)

    def use(self, keys: Sequence[int]) -> None:
        """Keep these blocks for one sequence more, until it calls `release`."""
        for key in keys:
            self._used[key] = self._used.get(key, 0) + 1
            self._kept_kv -= self._kept.pop(key, 0.0)

    def release(self, keys: Sequence[int], kv_blocks: float) -> None:
        """Undo `use`. Blocks that no sequence uses now take `kv_blocks` of the engine's KV blocks each."""
        for key in reversed(keys):
            left = self._used[key] - 1
            if left:
                self._used[key] = left
                continue
            del self._used[key]
            self._kept[key] = kv_blocks
            self._kept_kv += kv_blocks
        while len(self._kept) > KEPT_MAX:
            self._drop()

    def shrink(self, free: float) -> None:
        """Drop blocks that no sequence uses until the others take at most `free` of the KV blocks."""
        while self._kept_kv > free and self._kept:
            self._drop()

    def clear(self) -> None:
        """Drop all blocks that no sequence uses."""
        self._kept.clear()
        self._kept_kv = 0.0

    def _drop(self) -> None:
        _, kv_blocks = self._kept.popitem(last=False)
        self._kept_kv = self._kept_kv - kv_blocks if self._kept else 0.0
