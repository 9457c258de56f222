"""What a simulated server is told at its start: options, faults and quirks."""

from enum import StrEnum

from gateway.core.profile import Profile
from gateway.core.value import valueclass


class Fault(StrEnum):
    """A way of going wrong, as a client sees it."""

    REFUSE = "refuse"  # connections are refused for a while; running answers go on
    HANG = "hang"  # the engine stands still, /health stays 200
    DIE_MID_STREAM = "die_mid_stream"  # the connection is reset after some chunks, or before an answer
    CRASH = "crash"  # the engine dies: an error event, [DONE]; refused until booted again
    ABORT = "abort"  # answers end early with finish_reason "abort", as in a stop without a drain
    GARBAGE = "garbage"  # bytes that are no HTTP
    GARBLED = "garbled"  # status 200 with a body that is neither JSON nor server-sent events
    UNAVAILABLE = "unavailable"  # 503, as with a full queue
    ERROR = "error"  # 500 before anything is generated
    SLOW_HEADERS = "slow_headers"  # the status line takes its time
    TRUNCATE = "truncate"  # a stream ends cleanly without finish_reason and [DONE]
    CHANNEL_MARKERS = "channel_markers"  # a thought, or an empty one's markers, stands in the content
    EMPTY_ANSWER = "empty_answer"  # success without a word
    WRONG_TEXT = "wrong_text"  # one token over and over, as from broken weights
    DRAIN = "drain"  # running answers go on, new ones get 500; /health stays 200
    RESTART = "restart"  # stops, boots again: new start time, counters at zero
    SILENT_STOP = "silent_stop"  # stops, tells nobody, waits for its callers to leave, boots again


class Quirk(StrEnum):
    """Known misbehaviour of some engine versions, off unless asked for. Names as in docs/profiles.md."""

    NULL_REASONING = "null_reasoning_content"  # thoughts arrive inside the content (vLLM #38855)
    STALE_TEMPLATE = "stale_chat_template"  # an empty thought's markers lead the content
    THINKS_UNASKED = "thinking_default_differs"  # a thought comes where nothing is said of it (vLLM #49955)
    TURN_MARKER_LEAKS = "turn_marker_leaks"  # streams end with a stray `<turn|>` (vLLM #49955)
    INVALID_TOOL_JSON = "streamed_tool_json_invalid"  # streamed tool arguments are cut (vLLM #38946)
    TOOL_MARKUP_LEAKS = "tool_markup_leaks"  # not streamed: the call stands in the text (vLLM #39043)
    TOOL_CHOICE_IGNORED = "tool_choice_not_enforced"  # `required` and named choices get prose (vLLM #50477)


@valueclass(frozen=True, slots=True)
class FaultOrder:
    """One order to go wrong.

    Attributes:
        fault: How.
        count: Requests it affects, for faults of single requests; None for every one until it is lifted.
        for_s: Engine seconds that `refuse` (None: 5 s) or `hang` (None: until it is lifted) lasts, the delay
            of `slow_headers` (None: 5 s), or the boot after `crash`, `restart` and `silent_stop` (None: as at
            startup).
        after_chunks: Events a stream sends first, for `die_mid_stream`, `abort` and `truncate`.
    """

    fault: Fault
    count: int | None = None
    for_s: float | None = None
    after_chunks: int = 3


@valueclass(frozen=True, slots=True)
class SimulatorOptions:
    """How to run one simulated server. All durations are engine time: `speed` shortens them.

    Attributes:
        profile: The deployment to imitate.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        speed: How many engine seconds pass in one real second.
        boot_s: How long it refuses connections first; None for the profile's own boot time (120 s where
            none is published).
        api_key: Key its /v1 routes ask for.
        served_model: Name it serves the model under, where not the profile's.
        seed: Of its texts and output lengths.
        accept: Tokens per step, where not the profile's (2.5 on the H100s is real text, 2.29 random tokens).
        max_num_queued_reqs: Requests it holds, running and waiting, before it answers 503; None for no limit.
        shutdown_timeout_s: How long a stop lets running answers finish; 0 cuts them off.
        answer_tokens: Median length of an answer that ends by itself.
        thought_tokens: Median length of a thought.
        fault: Order it starts with.
        quirks: Misbehaviour to show.
        prefix_caching: Whether it computes what prompts have in common once.
        stream_interval: Tokens per event of a stream, from the second event on; a request may say otherwise.
        prompt_tokens_details: Whether usage says how much of a prompt was cached.
        sleep_mode: Whether it has vLLM's routes for sleep, as in development mode with sleep enabled.
        sleep_s: How long it takes to fall asleep; a guess.
        wake_s: How long it takes to wake; a guess.
    """

    profile: Profile
    host: str = "127.0.0.1"
    port: int = 0
    speed: float = 1.0
    boot_s: float | None = 0.0
    api_key: str | None = None
    served_model: str | None = None
    seed: int = 0
    accept: float | None = None
    max_num_queued_reqs: int | None = None
    shutdown_timeout_s: float = 0.0
    answer_tokens: int = 200
    thought_tokens: int = 450
    fault: FaultOrder | None = None
    quirks: frozenset[Quirk] = frozenset()
    prefix_caching: bool = True
    stream_interval: int = 1
    prompt_tokens_details: bool = False
    sleep_mode: bool = False
    sleep_s: float = 2.0
    wake_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse a speed that stops time."""
        if self.speed <= 0:
            raise ValueError("speed must be above 0")

    @property
    def model(self) -> str:
        """The name it serves the model under."""
        return self.served_model or self.profile.served_model
