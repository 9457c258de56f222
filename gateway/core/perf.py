"""The latency model of a Gemma 4 server: a fitted formula for the duration of an engine step. Pure.

One continuous-batching step of vLLM, all times in seconds:

    mem  = t_mem + kv_read * C + kv_span * M        weights, KV bytes, longest row
    comp = t_seq * B + t_tok * P + t_attn * A       verify, prefill, prefill attention
    step = t_fixed + (mem**sharp + comp**sharp) ** (1 / sharp)

    B sequences decoding     C sum of their contexts      M longest context among them
    P prompt tokens in step  A sum over chunks of tokens * (start + tokens / 2)

Fitted to 101 published figures with 2.8 % mean error (docs/measurements.md#latency-model).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PerfModel:
    """Parameters of the step-time formula for one deployment.

    Attributes:
        t_fixed, t_mem, kv_read, kv_span, t_seq, t_tok, t_attn, sharp: As in the formula.
        accept: Tokens that a decoding sequence gains per step; above 1 with speculative decoding.
        draft: Draft tokens per step; they count towards the token budget of the step.
        overhead_s: Added to the time to first token, for tokenization, HTTP and scheduling.
    """

    t_fixed: float
    t_mem: float
    kv_read: float
    kv_span: float
    t_seq: float
    t_tok: float
    t_attn: float
    sharp: float
    accept: float = 1.0
    draft: int = 0
    overhead_s: float = 0.0

    def __hash__(self) -> int:
        return hash(self.t_mem)  # cheap, and selective enough: a cache key several times per request

    def step_s(
        self,
        *,
        decoding: int,
        context_sum: int,
        context_max: int,
        prefill_tokens: int = 0,
        prefill_attn: float = 0.0,
    ) -> float:
        """Return the duration of one step in seconds (the module docstring defines the inputs)."""
        mem = self.t_mem + self.kv_read * context_sum + self.kv_span * context_max
        comp = self.t_seq * decoding + self.t_tok * prefill_tokens + self.t_attn * prefill_attn
        if self.sharp == 1:
            return self.t_fixed + mem + comp
        return float(self.t_fixed + (mem**self.sharp + comp**self.sharp) ** (1 / self.sharp))

    def lone_step_s(self, context_tokens: int = 1024) -> float:
        """Return the duration of a step with a single stream at that context length, in seconds."""
        return self.step_s(decoding=1, context_sum=context_tokens, context_max=context_tokens)

    def lone_tokens_per_s(self, context_tokens: int = 1024) -> float:
        """Return the decode rate of a single stream at that context length, in tokens per second."""
        return self.accept / self.lone_step_s(context_tokens)

    def prefill_s(self, prompt_tokens: int, batched_tokens: int) -> float:
        """Return the prefill seconds of a prompt on an idle engine, in chunks of at most `batched_tokens`.

        This is engine time only, without `overhead_s`.
        """
        seconds = 0.0
        for start in range(0, prompt_tokens, batched_tokens):
            chunk = min(batched_tokens, prompt_tokens - start)
            seconds += self.step_s(
                decoding=0,
                context_sum=0,
                context_max=0,
                prefill_tokens=chunk,
                prefill_attn=chunk * (start + chunk / 2),
            )
        return seconds
