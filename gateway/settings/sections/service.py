"""What a gateway does for its callers and operators: `keys`, `requests`, `store`, `jobs` and the like."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.settings.fields import (
    Count,
    Events,
    Names,
    Positive,
    Seconds,
    Section,
    Sha256,
    ShortForm,
    Slug,
    StoreUrl,
    Text,
    WebhookUrl,
)


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


Keys = Annotated[dict[Slug, KeySection] | None, BeforeValidator(_some_keys)]


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


class StoreSection(Section):
    """Where gateways in front of one fleet share their limits. A plain URL is the short form."""

    url: StoreUrl
    """Redis or Valkey: redis://host:6379/0, rediss:// for TLS, unix:///path. Password: ${VAR}, %-encoded."""

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")] = "gw"
    """In front of every key: fleets that share a server need one each."""


def _store(written: Any) -> Any:
    return {"url": written} if isinstance(written, str) else written


StoreChoice = Annotated[StoreSection, ShortForm(_store, {"type": "string"})]


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
