"""The configuration file as it is written: one model per section, one documented field per key.

The docstring under a field is its documentation everywhere: in the JSON Schema that editors read, in
docs/configuration.md and in `missing` errors. Defaults are those of the core wherever the core has one.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.core.box import BoxRules
from gateway.core.canary import Canary
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.core.values import (
    Gates,
    RetryPolicy,
    Spill,
    TemplateCosts,
    Timeouts,
    TrafficClass,
    Waiting,
    Weights,
)
from gateway.settings.decisions import DecisionsSection
from gateway.settings.fields import (
    AddressText,
    Attempts,
    BaseUrl,
    Command,
    Comparisons,
    Count,
    CountComparisons,
    Events,
    HeaderValues,
    KneeCurve,
    Names,
    OptionalAddress,
    Positive,
    QuirkNames,
    Seconds,
    Section,
    Sha256,
    Share,
    ShortForm,
    Slug,
    StoreUrl,
    Text,
    Url,
    Versions,
    WebhookUrl,
    Weight,
    number,
)
from gateway.settings.site_profiles import SiteProfileSection
from gateway.settings.telemetry import TelemetrySection

_TIMEOUTS = Timeouts()
_WEIGHTS = Weights()
_COSTS = TemplateCosts()
_CLASS = TrafficClass(name="", pools=())
_GATES, _SPILL, _WAITING = Gates(), Spill(), Waiting()
_TRIGGER, _SWAPS, _CANARY = Trigger(), SwapRules("", {}), Canary()
_BOX = BoxRules(_SWAPS)

# ------------------------------------------------------------------ counting


def _tokenizer(written: Any) -> Any:
    if written == "approximate":
        return {"vocab": None}
    if isinstance(written, dict) and (not written or ("vocab" in written and not written["vocab"])):
        raise ValueError("name the vocabulary file: {vocab: gemma4.tiktoken}")
    if isinstance(written, dict):
        return written
    raise ValueError("write approximate, or {vocab: gemma4.tiktoken}: there is no silent default")


class TokenizerSection(Section):
    """How prompts are counted. `approximate` in place of this section: by class counts, with a band."""

    model_config = ConfigDict(json_schema_extra={"required": ["vocab"]})

    vocab: Text | None = None
    """The site's own vocabulary, built by `gemma-gateway vocab build`; relative to this file. Exact."""


# ------------------------------------------------------------------ backends


class LimitsSection(Section):
    """A backend's own figures, in place of its profile's."""

    knee_seqs: KneeCurve | None = None
    """Requests at once: one number, or a curve as [{prompt_tokens: "<= 2000", seqs: 64}, {seqs: 12}]."""

    context_tokens: Positive | None = None
    """Prompt plus output of one request: the engine's `--max-model-len`."""

    kv_blocks: Positive | None = None
    """Size of the KV pool in blocks. An explicit null leaves KV to the engine alone."""

    kv_budget: Share | None = None
    """Share of the KV blocks that admission plans with, above 0 and up to 1."""


class ModalitiesSection(Section):
    """What a backend accepts besides text, in place of what its profile says."""

    images_max: Count | None = None
    """Images per request; 0 for none, an explicit null for no limit."""

    audios_max: Count | None = None
    """Audio parts per request; 0 for none, an explicit null for no limit."""


class QuirksSection(Section):
    """What a backend's engine is known to do wrong, where that differs from its profile: docs/quirks.md."""

    add: QuirkNames = ()
    """Quirks it has besides those of its profile."""

    remove: QuirkNames = ()
    """Quirks of its profile that it has not, as after an upgrade."""


class TlsSection(Section):
    """How an https backend's certificate is checked."""

    ca_file: Text | None = None
    """Certificates to trust instead of the system's, in PEM; relative to this file."""

    verify: bool = True
    """Whether the certificate is checked at all."""


class BackendSection(Section):
    """One vLLM server."""

    url: BaseUrl
    """Scheme, host and port, without /v1. Two backends never share a URL: each is counted alone."""

    profile: Text
    """The profile its figures come from: a shipped one (docs/profiles.md) or one under `profiles`."""

    model: Text | None = None
    """The name it serves the model under. Left out, it is learned from the backend's /v1/models."""

    api_key_env: Text | None = None
    """Environment variable that holds the backend's API key."""

    api_key_file: Text | None = None
    """File that holds the backend's API key; relative to this file."""

    limits: LimitsSection = LimitsSection()
    """Figures that differ from the profile's."""

    modalities: ModalitiesSection = ModalitiesSection()
    """Images and audio, where they differ from the profile's."""

    quirks: QuirksSection = QuirksSection()
    """Known misbehaviour of its engine, where it differs from the profile's."""

    drain: bool = False
    """Finish what runs there, send nothing new."""

    boot_budget_s: Seconds | None = None
    """Seconds it may take to become ready before that counts as a fault. Left out: the profile's."""

    tls: TlsSection = TlsSection()
    """How an https backend's certificate is checked."""

    versions: Versions | None = None
    """Engine versions it may have, as ">= 0.20, < 0.24"; with another it gets no traffic. Left out: any."""

    @model_validator(mode="after")
    def _one_key(self) -> "BackendSection":
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        return self


class TimeoutsSection(Section):
    """How long each phase of an attempt may take."""

    connect_s: Seconds = _TIMEOUTS.connect_s
    """Seconds to open the connection."""

    first_byte_s: Seconds = _TIMEOUTS.first_byte_s
    """Seconds from sending the request to the first generated byte; a long prefill happens here."""

    idle_s: Seconds = _TIMEOUTS.idle_s
    """Seconds between two reads after that."""

    total_s: Seconds = _TIMEOUTS.total_s
    """Seconds for the whole attempt; keep-alive comments cannot extend it."""


class PoolTimeoutsSection(Section):
    """A pool's own timeouts. What is left out comes from the top-level `timeouts`."""

    connect_s: Seconds | None = None
    """Seconds to open the connection."""

    first_byte_s: Seconds | None = None
    """Seconds from sending the request to the first generated byte."""

    idle_s: Seconds | None = None
    """Seconds between two reads after that."""

    total_s: Seconds | None = None
    """Seconds for the whole attempt."""


class GatesSection(Section):
    """What a pool lets in beside the knee, per backend: docs/routing.md says what each is worth."""

    long_prompt_tokens: Positive = _GATES.long_prompt_tokens
    """From this length on a prompt is long."""

    long_prefills: Count | None = None
    """Long prompts read at once; 0: only where nothing else runs. Left out: 0 for chat pools, else 1."""

    long_seqs: Positive | None = None
    """Long documents a backend may hold: 4 to 6 where somebody reads along, 12 to 16 for throughput."""

    prefill_s: Seconds | None = None
    """Seconds of prompt work outstanding at which it takes no more. Left out: 0.6 for chat pools."""


class SpillSection(Section):
    """When a pool takes work that would rather go to an earlier pool of its class."""

    reserve: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)] = _SPILL.reserve
    """Share of the knee that is left free for the pool's own work."""

    prefill_s: Seconds = _SPILL.prefill_s
    """Seconds of prompt work outstanding from which on it takes none."""


_POOL_SHORT: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}


def _pool(written: Any) -> Any:
    return {"backends": written} if isinstance(written, list) else written


class PoolSection(Section):
    """Backends that are interchangeable. A plain list of them is the short form."""

    backends: Names
    """Backend ids; at equal scores the earlier one is taken."""

    timeouts: PoolTimeoutsSection = PoolTimeoutsSection()
    """Timeouts of this pool, where they differ from the top-level `timeouts`."""

    gates: GatesSection = GatesSection()
    """What it lets in beside the knee."""

    spill: SpillSection = SpillSection()
    """When it takes work of classes whose first choice is another pool."""

    tpot_target_ms: Annotated[float, Field(gt=0, le=60_000), BeforeValidator(number)] | None = None
    """Milliseconds per output token to keep to: a backend that exceeds them gets less than its knee."""


# ------------------------------------------------------------------ boxes


class ExecSection(Section):
    """Commands of this machine that start and stop a model, an ssh call for example."""

    start: Command
    """Starts it and returns without waiting until it answers: a list of words. It may be run twice."""

    stop: Command
    """Stops it and returns when its memory is free. Nothing to stop is no failure."""

    shell: bool = False
    """Run them by /bin/sh; each is one text then."""

    timeout_s: Seconds = 60.0
    """Seconds a command may take; then it is killed and has failed."""

    kill_with_gateway: bool = False
    """Whether a command that runs when the gateway ends is killed. If not, it is left to finish."""

    @model_validator(mode="after")
    def _words(self) -> "ExecSection":
        for command in (self.start, self.stop):
            if self.shell and len(command) > 1:
                raise ValueError("with shell: true a command is one text, not a list of words")
            if not self.shell and len(command) == 1 and " " in command[0]:
                raise ValueError("write a command as a list of its words, or set shell: true")
        return self


class RequestSection(Section):
    """One HTTP request. A status of 200 to 299 is success; redirects are not followed."""

    method: Literal["GET", "POST", "PUT", "DELETE"] = "POST"
    """Its method."""

    url: Url
    """Where it goes, path and query included."""

    body: dict[str, Any] | None = None
    """What is sent as JSON. Left out, nothing is."""


class HttpSection(Section):
    """Requests that start and stop a model: llama-swap, or an agent of your own on the box."""

    start: RequestSection
    """Starts it. It may be sent twice."""

    stop: RequestSection
    """Stops it and is answered when its memory is free. Nothing to stop is no failure."""

    token_env: Text | None = None
    """Environment variable with a token, sent as `authorization: Bearer`."""

    timeout_s: Seconds = 60.0
    """Seconds a request may take. Some agents answer only when the model does."""


class SleepSection(Section):
    """vLLM's sleep mode: the server stays, its memory is freed. It needs VLLM_SERVER_DEV_MODE=1."""

    level: Literal[1, 2] = 1
    """1 keeps the weights in the machine's memory; 2 reads them anew, and on unified memory frees more."""

    timeout_s: Seconds = 60.0
    """Seconds that falling asleep, or waking up, may take."""


class CanarySection(Section):
    """What a model is asked after every boot, before it serves: a healthy server may answer nonsense."""

    prompt: Text = _CANARY.prompt
    """The question, at temperature 0."""

    expect: Text = _CANARY.expect
    """What the answer must contain, in small or capital letters."""

    reasoning: bool = _CANARY.reasoning
    """Ask for a thought, which must not be empty."""

    max_tokens: Positive = _CANARY.max_tokens
    """Tokens the answer may have, a thought included."""

    timeout_s: Seconds = _CANARY.timeout_s
    """Seconds it may take."""


class MemberSection(Section):
    """One model of the box: how it is started and stopped, by exactly one of three ways, and when."""

    exec: ExecSection | None = None
    """By commands."""

    http: HttpSection | None = None
    """By requests."""

    sleep: SleepSection | None = None
    """By vLLM's sleep mode."""

    jobs: Positive = _TRIGGER.jobs
    """As many requests that wait for it start a swap."""

    max_wait_s: Seconds = _TRIGGER.wait_s
    """Seconds after which one that waits for it starts a swap."""

    canary: CanarySection = CanarySection()
    """What it is asked before it serves."""

    @model_validator(mode="after")
    def _one_way(self) -> "MemberSection":
        if sum(way is not None for way in (self.exec, self.http, self.sleep)) != 1:
            raise ValueError("give exactly one of exec, http and sleep")
        return self


class BoxSection(Section):
    """One machine on which models take turns, one at a time (docs/boxes.md)."""

    backends: dict[Slug, MemberSection]
    """The backends that share it, by their names under the top-level `backends`."""

    default: Slug
    """Whose model is in when nobody wants anything."""

    boot_budget_s: Seconds = _BOX.boot_budget_s
    """Seconds from the start of a model to its first answer; beyond them it is put into quarantine."""

    residency_s: Seconds = _SWAPS.residency_s
    """Seconds a model that came in stays at least."""

    idle_s: Seconds = _SWAPS.idle_s
    """Seconds without work after which the box goes back to the default."""

    launch_record: Text | None = None
    """File that keeps a hash of every start command, to warn when one changes; relative to this file."""

    @model_validator(mode="after")
    def _several(self) -> "BoxSection":
        if len(self.backends) < 2:
            raise ValueError("a box needs two backends or more: they take turns")
        return self


# ------------------------------------------------------------------ models and classes


class WhenSection(Section):
    """A condition: every key that is given must hold; without any it always does."""

    prompt_tokens: Comparisons | None = None
    """The prompt's estimated length, template, tools and images included."""

    total_tokens: Comparisons | None = None
    """That plus the output: `max_tokens`, or `output_reserve_tokens` where the caller gives none."""

    max_tokens: Comparisons | None = None
    """`max_completion_tokens` or `max_tokens` as the caller gave it."""

    images: CountComparisons | None = None
    """Images in the request: true for any, false for none, or a comparison."""

    audio: CountComparisons | None = None
    """Audio parts in the request: true for any, false for none, or a comparison."""

    tools: CountComparisons | None = None
    """Tools offered to the model: true for any, false for none, or a comparison."""

    reasoning: bool | None = None
    """Whether a thought is asked for: `reasoning_effort`, `enable_thinking`, or a reasoning alias."""

    stream: bool | None = None
    """Whether the answer is streamed."""

    key: Names | None = None
    """Name of the caller's API key under `keys`: one, or a list of which any will do."""

    header: dict[str, HeaderValues] = Field(default_factory=dict)
    """Request headers by name: the value, a list of accepted values, or true where any value will do."""


class WaitingSection(Section):
    """How requests of a class wait for a place when every backend is full."""

    max_wait_s: Seconds | None = None
    """The longest a request waits; would it be longer, it is refused at once. Left out: 1.2, 900 or 600."""

    ttft_target_s: Seconds | None = None
    """Seconds from arrival in which the first token is wanted. It orders the line. Left out: 2, 60 or 600."""

    prefill_weight: Weight | None = None
    """How many times a prompt's own reading time comes on top of that. Above 1, short ones go first."""

    waiting_max: Positive = _WAITING.waiting_max
    """Requests of the class that may wait."""

    waiting_bytes_max: Positive = _WAITING.waiting_bytes_max
    """Bytes they may hold together."""

    when_late: Literal["refuse", "demote"] = "refuse"
    """What becomes of one that is late: refused with 429, or sent behind the others."""

    demoted_wait_s: Seconds | None = None
    """The longest one that was sent behind waits, in all. Left out: twice max_wait_s, and 60 at least."""

    keep_alive_after_s: Seconds | None = None
    """Seconds after which a stream without a token gets its headers, then comments. Left out: never."""

    passes_max: Count = _WAITING.passes_max
    """How many smaller requests may pass one that does not fit yet."""


class QueueSection(Section):
    """The class's chats are jobs, served in place: they wait in the store, for as long as it takes."""

    on_disconnect: Literal["cancel", "finish"] = "cancel"
    """What becomes of one whose caller leaves before its answer is complete."""


class ClassSection(Section):
    """One kind of work and where it goes. Classes are tried top to bottom; the first that matches wins."""

    name: Slug = Field(alias="class")
    """short_chat, long_document, reasoning, or a name of your own; callers see it in x-gateway-class."""

    when: WhenSection = WhenSection()
    """What makes a request one of these. Left out, everything is."""

    pools: Names
    """Pool ids, first choice first; the later ones are the spill order."""

    output_reserve_tokens: Positive = _CLASS.output_reserve_tokens
    """Output to plan for when the caller gives no `max_tokens`."""

    priority: int = _CLASS.priority
    """Among the classes that wait, the higher goes first."""

    waiting: WaitingSection = WaitingSection()
    """How its requests wait when every backend is full."""

    queue: QueueSection | None = None
    """Serve its chats as jobs, in place (docs/jobs.md). Needs `jobs`. Left out: they wait in the line."""


class PromptSection(Section):
    """Constants of the chat template that prompt length depends on (docs/measurements.md#prompt-length)."""

    image_tokens: Count = _COSTS.image
    """Soft tokens per image: the processor's budget. A request's own `max_soft_tokens` goes before it."""

    audio_tokens: Count = _COSTS.audio
    """Soft tokens of an audio part of unknown length: the most one can have."""

    empty_thought_tokens: Count = _COSTS.empty_thought
    """Tokens of the empty thought a template writes when thinking is off; 0 for templates without it."""


class ModelSection(Section):
    """A name applications send, and its classes. Each backend gets its own served name."""

    aliases: tuple[Text, ...] = ()
    """Other names that mean the same model."""

    reasoning_aliases: tuple[Text, ...] = ()
    """Names that also make a request a reasoning one."""

    classes: Annotated[tuple[ClassSection, ...], Field(min_length=1)]
    """Tried top to bottom; the first that matches wins."""

    prompt: PromptSection = PromptSection()
    """Constants of the chat template."""


# ------------------------------------------------------------------ the rest


class WeightsSection(Section):
    """How much each score counts when the backends of a pool are ranked; 0 switches one off."""

    spare_knee: Weight = _WEIGHTS.spare_knee
    """Prefer the backend with the largest share of its knee free."""

    speed: Weight = _WEIGHTS.speed
    """Prefer the backend whose profile decodes faster."""

    prefix_affinity: Weight = _WEIGHTS.prefix_affinity
    """Prefer the replica that holds a conversation's prefix: a tie-break (docs/measurements.md#affinity)."""

    slow_context: Weight = _WEIGHTS.slow_context
    """Keep prompts from a busy backend that stalls at their length (docs/quirks.md#context_2k_stall)."""


class RoutingSection(Section):
    """How a backend is picked."""

    weights: WeightsSection = WeightsSection()
    """How much each score counts."""

    attempts_max: Attempts = RetryPolicy().attempts_max
    """How many backends may be tried before the caller hears of a failure."""


class KeySection(Section):
    """A caller's API key: exactly one of the three. The key itself never stands in this file."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    sha256: Sha256 | None = None
    """SHA-256 of the key in hex: `printf %s "$KEY" | sha256sum`."""

    env: Text | None = None
    """Environment variable that holds the key."""

    file: Text | None = None
    """File that holds the key; relative to this file."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "KeySection":
        if sum(part is not None for part in (self.sha256, self.env, self.file)) != 1:
            raise ValueError("give exactly one of sha256, env and file")
        return self


def _some_keys(written: Any) -> Any:
    if not written:  # `keys:` with every line below it commented out must not open the gateway
        raise ValueError("name at least one key, or leave `keys` out to be open to everyone")
    return written


class RequestsSection(Section):
    """What is accepted from callers."""

    max_body_bytes: Positive = 32 * 1024 * 1024
    """Bytes a request body may have; above it 413. A document of 256K tokens is about 1 MB, images more."""

    body_timeout_s: Seconds = 60.0
    """Seconds a caller may take to send its body; above it 408."""

    max_choices: Positive = 16
    """Largest `n` times number of prompts."""

    remote_media: bool = False
    """Whether images may be given as http URLs, which the backends would fetch; if not, only data: URLs."""

    drop_fields: tuple[Text, ...] = (
        "chat_template",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "request_id",
        "priority",
    )
    """Request members that reach into the engine; they are taken out before a request travels on."""

    usage_in_streams: bool = True
    """Ask backends for the usage event of every stream, and hide it from callers who did not ask."""


class AnswersSection(Section):
    """What callers get."""

    reasoning_field: Literal["as_sent", "reasoning", "reasoning_content", "both"] = "as_sent"
    """Where callers find a thought, whichever of the two names a backend uses (docs/quirks.md)."""


class ResponsesSection(Section):
    """What is kept of /v1/responses: in the store if there is one, else in memory."""

    keep_s: Seconds = 86_400.0
    """Seconds a response is kept, unless its request says `store: false`."""

    max_bytes_per_key: Count = 64 * 1024 * 1024
    """Bytes of responses, with their conversations, that one key may have; the oldest go first. 0: none."""


class IdempotencySection(Section):
    """Answers kept for `Idempotency-Key` (docs/idempotency.md): in a store if there is one, or in memory."""

    keep_s: Seconds = 86_400.0
    """Seconds in which the same key gets the same answer again."""

    max_answer_bytes: Positive = 8 * 1024 * 1024
    """Bytes an answer may have to be kept; a stream has up to 300 per token."""

    max_bytes_per_key: Count = 64 * 1024 * 1024
    """Bytes of answers that one API key may have; the oldest go first. 0: none."""


class HealthSection(Section):
    """When a backend counts as healthy."""

    interval_s: Seconds = 1.0
    """Seconds between two probes of a backend."""

    timeout_s: Seconds = 2.0
    """Seconds one probe may take."""

    failures: Positive = 3
    """Failures that eject a backend: of probes in a row, of requests less the successes between them."""

    ejection_s: Seconds = 5.0
    """Seconds of a first ejection; each further one doubles it."""

    ejection_max_s: Seconds = 60.0
    """Seconds an ejection lasts at most."""

    hang_s: Seconds = 30.0
    """Seconds without a token, while requests run, that count as a hang; more where one step takes longer."""

    probation_successes: Positive = 3
    """Requests that must succeed before a backend that came back is trusted again."""


class StoreSection(Section):
    """Where gateways in front of one fleet share their limits. A plain URL is the short form."""

    url: StoreUrl
    """Redis or Valkey: redis://host:6379/0, rediss:// with TLS, unix:///path. A password through ${VAR}."""

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")] = "gw"
    """In front of every key: fleets that share a server need one each."""


def _store(written: Any) -> Any:
    return {"url": written} if isinstance(written, str) else written


class BatchesSection(Section):
    """Files of requests that are worked off within a day (docs/batches.md)."""

    file_bytes_max_per_key: Positive = 1024 * 1024 * 1024
    """Bytes that the files of one API key may hold together, those that batches leave included."""

    file_keep_s: int = Field(default=2_592_000, ge=3_600, le=2_592_000)
    """Seconds that a file is kept, unless its caller says otherwise."""

    queued_max_per_key: Positive = 1_000
    """Lines of one API key's batches that may wait or run as jobs; the others follow as these end."""


class JobsSection(Section):
    """Requests that are handed over, and whose answers are fetched later. Without it there are none."""

    data_dir: Text = "gateway-data"
    """Where they are kept if the file names no `store`; relative to this file. Made if need be."""

    keep_s: Seconds = 86_400.0
    """Seconds that a result is kept after its end."""

    unstored_keep_s: Seconds = 600.0
    """The same for requests with `store: false`."""

    queued_max_per_key: Positive = 10_000
    """Jobs of one API key that may wait or run."""

    bytes_max_per_key: Positive = 1024 * 1024 * 1024
    """Bytes that the jobs and results of one API key may hold together."""

    priorities: dict[Slug, Literal["high", "normal", "batch"]] = Field(default_factory=dict)
    """Priority of an API key's jobs by its name; else normal. A caller may ask for less, never for more."""

    work_in_serve: bool = True
    """Whether `serve` works jobs off itself. If not, they wait for a `gemma-gateway worker`."""

    running_max: Positive = 64
    """Jobs that one process has at once."""

    attempts_max: Positive = 3
    """Failures after which a job is given up."""

    resume: Literal["continue", "restart"] = "continue"
    """How a job goes on whose backend or worker died: from the text it has, if it can, or from the start."""

    batches: BatchesSection = Field(default_factory=BatchesSection)
    """Files of requests that are worked off within a day (docs/batches.md)."""


class WebhookSection(Section):
    """An address of yours that is told when jobs and batches end, by Standard Webhooks (docs/webhooks.md)."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["secret_env"]}, {"required": ["secret_file"]}]}
    )

    url: WebhookUrl
    """Where to send, https://host/path."""

    secret_env: Text | None = None
    """Environment variable with the signing secret, whsec_...; several, spaced, to replace one."""

    secret_file: Text | None = None
    """File with the same, one secret per line; relative to this file."""

    events: Events = ("response.*", "batch.*")
    """What it hears of, such as response.completed or batch.*. Left out: everything."""

    keys: Names | None = None
    """Names under `keys` of the API keys whose jobs it hears of. Left out: everybody's."""

    allow_private: bool = False
    """Whether its host may have a private or loopback address; refused otherwise, whatever its name says."""

    @model_validator(mode="after")
    def _one_place(self) -> "WebhookSection":
        if (self.secret_env is None) == (self.secret_file is None):
            raise ValueError("give secret_env or secret_file, and not both")
        return self


class ReloadSection(Section):
    """Another configuration while the gateway runs; SIGHUP always has the file read again."""

    watch: bool = True
    """Whether a file that has changed is read again by itself. One that cannot be used changes nothing."""


class ShutdownSection(Section):
    """What happens on SIGTERM."""

    drain_s: Seconds = 600.0
    """Seconds that running requests get to finish before they are cut; a second signal cuts them at once."""


class Document(Section):
    """A Gemma Gateway configuration file."""

    listen: AddressText = "127.0.0.1:8080"
    """Where applications connect, as host:port."""

    admin: OptionalAddress = "127.0.0.1:9090"
    """Where operators connect (status, metrics, jobs); off for nowhere. Never expose it."""

    admin_names: tuple[Text, ...] = ()
    """Host names by which operators call it, beside addresses, localhost and names without a dot."""

    tokenizer: Annotated[
        TokenizerSection,
        ShortForm(_tokenizer, {"const": "approximate"}),
    ]
    """How prompts are counted: {vocab: FILE} exactly, `approximate` with a band. There is no default."""

    backends: Annotated[dict[Slug, BackendSection], Field(min_length=1)]
    """The vLLM servers, each under a name of your own."""

    pools: Annotated[dict[Slug, Annotated[PoolSection, ShortForm(_pool, _POOL_SHORT)]], Field(min_length=1)]
    """Which backends are interchangeable."""

    boxes: dict[Slug, BoxSection] = Field(default_factory=dict)
    """Machines on which several backends take turns, one model at a time."""

    models: Annotated[dict[Text, ModelSection], Field(min_length=1)]
    """The names applications send, and the classes of work behind each."""

    profiles: dict[Slug, SiteProfileSection] = Field(default_factory=dict)
    """Profiles of your own: a shipped one with any figure replaced."""

    timeouts: TimeoutsSection = TimeoutsSection()
    """Timeouts of every pool that sets none of its own."""

    routing: RoutingSection = RoutingSection()
    """How a backend is picked."""

    keys: Annotated[dict[Slug, KeySection] | None, BeforeValidator(_some_keys)] = None
    """API keys of callers, each under a name. Left out, the gateway is open to everyone who can reach it."""

    requests: RequestsSection = RequestsSection()
    """What is accepted from callers."""

    answers: AnswersSection = AnswersSection()
    """What callers get."""

    responses: ResponsesSection = ResponsesSection()
    """What is kept of /v1/responses."""

    idempotency: IdempotencySection = IdempotencySection()
    """Answers kept for `Idempotency-Key`."""

    health: HealthSection = HealthSection()
    """When a backend counts as healthy."""

    store: Annotated[StoreSection, ShortForm(_store, {"type": "string"})] | None = None
    """Redis or Valkey through which several gateways share limits. Left out, this process counts alone."""

    jobs: JobsSection | None = None
    """Requests that are handed over, and whose answers are fetched later. Left out, there are none."""

    webhooks: dict[Slug, WebhookSection] = Field(default_factory=dict)
    """Who is told when jobs end, each under a name. Needs `jobs`."""

    telemetry: TelemetrySection = TelemetrySection()
    """What is sent to an OpenTelemetry receiver."""

    decisions: DecisionsSection | None = None
    """A log of decisions, to try another policy on. Left out, none is written."""

    reload: ReloadSection = ReloadSection()
    """Another configuration while the gateway runs."""

    shutdown: ShutdownSection = ShutdownSection()
    """What happens on SIGTERM."""
