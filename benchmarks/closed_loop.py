"""A closed-loop benchmark in virtual time: what `vllm bench serve --max-concurrency` measures."""

from dataclasses import dataclass
from statistics import fmean

from gateway.core.engine import Engine
from gateway.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run, from the callers' side.

    Attributes:
        tokens_per_s: Output tokens of all requests divided by the duration.
        ttft_s: Mean time to first token.
        tpot_s: Mean time per output token after the first; 0 for one-token outputs.
        latency_s: Mean time from request to last token.
        duration_s: Duration of the run.
        steps: Number of engine steps.
    """

    tokens_per_s: float
    ttft_s: float
    tpot_s: float
    latency_s: float
    duration_s: float
    steps: int

    @property
    def request_tokens_per_s(self) -> float:
        """Decode rate of a single request."""
        return 1 / self.tpot_s


def closed_loop(
    profile: Profile, *, prompt_tokens: int, output_tokens: int, concurrency: int, requests: int
) -> Measured:
    """Simulate `requests` equal requests by `concurrency` callers, each sending one after another.

    The first `concurrency` start together; each finished request is immediately followed by the next. The
    model's `overhead_s` counts towards the first token but not towards the duration, because one caller's
    tokenization overlaps with other callers' steps.
    """
    engine = Engine.of(profile)
    begun: list[float] = []
    first: dict[int, float] = {}
    done: dict[int, float] = {}
    now = 0.0
    steps = 0

    def send(count: int) -> None:
        for _ in range(min(count, requests - len(begun))):
            engine.submit(len(begun), prompt_tokens, output_tokens)
            begun.append(now)

    send(concurrency)
    while (batch := engine.schedule()) is not None:
        now += batch.duration_s
        steps += 1
        result = engine.complete()
        for seq_id in result.first:
            first[seq_id] = now
        for seq_id in result.finished:
            done[seq_id] = now
        send(len(result.finished))
    if len(done) < requests:
        raise ValueError(f"{profile.name} cannot hold a sequence of {prompt_tokens} + {output_tokens} tokens")
    overhead = profile.perf.overhead_s
    return Measured(
        tokens_per_s=requests * output_tokens / now,
        ttft_s=fmean(first[i] - begun[i] for i in range(requests)) + overhead,
        tpot_s=fmean(done[i] - first[i] for i in range(requests)) / max(1, output_tokens - 1),
        latency_s=fmean(done[i] - begun[i] for i in range(requests)) + overhead,
        duration_s=now,
        steps=steps,
    )
