"""KV-cache accounting in blocks, the engine's unit of allocation.

Gemma 4 mixes sliding-window layers, which never hold more than their window, with global layers,
which hold the whole context. A budget in tokens treats them alike and is wrong by up to 7x: at
16K in / 1K out a 2x H100 server holds 95 sequences, but `244K tokens / 17.4K` gives 14. Blocks are
counted per layer, in the sizes vLLM unifies its pages to (16 tokens of a sliding or drafter layer,
32 of a global one). The formula reproduces four published "maximum concurrency" figures to 0.1%
(docs/measurements.md#kv-blocks).
"""

from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class KvFormula:
    """How many KV blocks one sequence of a given length occupies on one model build.

    Attributes:
        sliding_layers: Layers that keep only the last `window_tokens`.
        global_layers: Layers that keep every token.
        drafter_layers: Layers of a speculative drafter; they keep every token.
        window_tokens: Width of the sliding window.
        sliding_block_tokens: Tokens per block of a sliding or drafter layer.
        global_block_tokens: Tokens per block of a global layer.
    """

    sliding_layers: int
    global_layers: int
    drafter_layers: int = 0
    window_tokens: int = 1024
    sliding_block_tokens: int = 16
    global_block_tokens: int = 32

    def blocks(self, context_tokens: int) -> int:
        """Return the blocks a sequence of `context_tokens` (prompt plus output) holds while decoding."""
        window = self.window_tokens
        return self._sum(context_tokens, context_tokens if context_tokens < window else window)

    def boot_blocks(self, context_tokens: int, batched_tokens: int) -> int:
        """Return the blocks vLLM reserves per sequence when it prints "maximum concurrency" at boot.

        During a prefill step, every sliding layer holds the chunk of `batched_tokens`
        (`max_num_batched_tokens`) in addition to its window.
        """
        window = min(self.window_tokens - 1 + batched_tokens, context_tokens)
        return self._sum(context_tokens, window)

    def total_blocks(self, logged_tokens: int) -> int:
        """Return the pool size for "GPU KV cache size: N tokens" as vLLM <= 0.20 logs it.

        Later versions log concurrency x max_model_len instead (vLLM #43308): configure blocks directly.
        """
        layers = self.sliding_layers + self.global_layers + self.drafter_layers
        return logged_tokens // self.sliding_block_tokens * layers

    def _sum(self, context: int, window: int) -> int:
        """Each layer holds its tokens in blocks, the last one partly filled: -(-a // b) rounds up."""
        block = self.sliding_block_tokens
        return (
            self.sliding_layers * (-(-window // block) + 1)
            + self.drafter_layers * -(-context // block)
            + self.global_layers * -(-context // self.global_block_tokens)
        )
