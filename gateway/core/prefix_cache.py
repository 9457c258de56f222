"""The prefix cache of an engine: which blocks of prompts it has kept, and which it gives up first. Pure.

As vLLM's: a prompt is cut into blocks, each known by a key that stands for everything up to its end. What a
sequence has computed is kept when it ends, in the KV blocks that nobody needs, and the least recently used
goes first when somebody does; of one prompt, its end before its beginning.

A model with sliding-window layers can go on only where these have the window before, and vLLM (since August
2026, `prefix_cache_retention_interval`) keeps that in two places: at the end of a prompt, and where a prompt
has left one that was kept. So what an engine has answered is read with the next turn, and what two prompts
have in common with the second.
"""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 128
"""Tokens per block: of a repeated prompt of 613 tokens, vLLM 0.32 found 512 with Gemma 4, on a CPU. On a GPU
its blocks have 32, which finds 48 tokens more on average."""

KEPT_MAX = 65_536
"""Maximum blocks that no sequence uses. A choice that bounds memory: 8 million tokens, where a server of two
H100 holds some 0.4 million."""


class PrefixCache:
    """See the module."""

    __slots__ = ("_kept", "_kept_kv", "_used", "_window", "_windows")

    def __init__(self, window_tokens: int = 0) -> None:
        """Start empty. `window_tokens`: width of the sliding layers; 0 if there are none."""
        self._window = -(-(window_tokens - 1) // BLOCK_TOKENS) if window_tokens else 0  # blocks
        self._windows: set[int] = set()  # blocks of which the sliding layers are kept
        self._used: dict[int, int] = {}  # number of sequences by key
        self._kept: OrderedDict[int, float] = OrderedDict()  # KV blocks by key, the next to go first
        self._kept_kv = 0.0

    def found(self, keys: Sequence[int]) -> tuple[int, int]:
        """Return after how many blocks a prompt can go on, and how many it shares with what is kept."""
        common = 0
        for key in keys:
            if key not in self._used and key not in self._kept:
                break
            common += 1
        if not self._window:
            return common, common
        in_row = 0
        for index in range(common - 1, -1, -1):
            in_row = in_row + 1 if keys[index] in self._windows else 0
            if in_row == self._window:
                return index + in_row, common
        return in_row, common

    def keep_window(self, keys: Sequence[int], end: int, computed: int) -> None:
        """Of the `computed` blocks, keep the sliding layers of the window that ends after `end` blocks."""
        self._windows.update(keys[max(0, end - self._window) : min(end, computed)])

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
        self._windows.difference_update(self._kept)
        self._kept.clear()
        self._kept_kv = 0.0

    def _drop(self) -> None:
        key, kv_blocks = self._kept.popitem(last=False)
        self._windows.discard(key)
        self._kept_kv = self._kept_kv - kv_blocks if self._kept else 0.0
