"""What a gateway does for its callers and operators: `keys`, `requests`, `store`, `jobs` and the like.

Defaults are choices, except `file_keep_s`, whose limits are OpenAI's. Those in bytes and of jobs per key
bound what one caller takes; `max_body_bytes` and `drain_s` have room for long documents and answers.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gateway.core.files import EXPIRES_MAX_S, EXPIRES_MIN_S
from gateway.settings.addresses import StoreUrl, WebhookUrl
from gateway.settings.fields import (
    Count,
    Events,
    Names,
    Pause,
    Positive,
    Prefix,
    Seconds,
    Section,
    Sha256,
    ShortForm,
    Slug,
    Text,
)


class KeySection(Section):
    """A caller's API key: exactly one of the three. The key itself is never in this file."""

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


_NEEDED = frozenset({"model", "messages", "prompt"})


class RequestsSection(Section):
    """What is accepted from callers."""

    max_body_bytes: Positive = 32 * 1024 * 1024
    """Maximum request body in bytes; above it 413. A document of 256K tokens is about 1 MB, images more.
    Whatever is neither image, recording nor text of a user may have 8 MiB at most."""

    body_timeout_s: Seconds = 60.0
    """Seconds a caller may take to send its body; after that 408."""

    max_choices: Positive = 16
    """Maximum of `n` times the number of prompts."""

    remote_media: bool = False
    """Whether to accept images and audio as URLs that the backends would fetch; if not, only data: URLs."""

    drop_fields: tuple[Text, ...] = (
        "chat_template",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "request_id",
        "rid",
        "priority",
        "input_ids",
        "session_params",
        "custom_logit_processor",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "adapters",
        "draft_model",
    )
    """Request members that reach into the engine; removed before a request is forwarded.

    They are removed from `chat_template_kwargs`, too. The header `x-gateway-dropped` of the response names
    those that were.
    """

    usage_in_streams: bool = True
    """Ask backends for the usage event of every stream, and hide it from callers who did not ask for it; with
    it, vLLM's `system_fingerprint`, which it then writes into that event."""

    @field_validator("drop_fields")
    @classmethod
    def _not_needed_here(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if needed := _NEEDED & set(names):
            raise ValueError(f"the gateway itself needs {min(needed)}; requests without it are refused")
        return names


class AnswersSection(Section):
    """How answers look to callers."""

    reasoning_field: Literal["as_sent", "reasoning", "reasoning_content", "both"] = "as_sent"
    """Where callers find reasoning, whichever of the two names a backend uses (docs/quirks.md)."""


class ResponsesSection(Section):
    """Responses kept for /v1/responses: in the store if there is one, else in memory."""

    keep_s: Seconds = 86_400.0
    """Seconds a response is kept, unless its request says `store: false`."""

    max_bytes_per_key: Count = 64 * 1024 * 1024
    """Bytes of responses, with their conversations, kept per key; the oldest go first. 0: none."""


class IdempotencySection(Section):
    """Answers kept for `Idempotency-Key` (docs/idempotency.md): in the store, with the jobs, or in memory."""

    keep_s: Seconds = 86_400.0
    """Seconds for which the same key gets the same answer again."""

    max_answer_bytes: Positive = 8 * 1024 * 1024
    """Largest answer kept, in bytes; a stream has up to 300 per token."""

    max_bytes_per_key: Count = 64 * 1024 * 1024
    """Bytes of answers kept per API key; the oldest go first. 0: none."""


class StoreSection(Section):
    """Where gateways in front of one fleet share their limits. A plain URL is the short form."""

    url: StoreUrl
    """Redis or Valkey: redis://host:6379/0, rediss:// for TLS, unix:///path. Password: ${VAR}, %-encoded."""

    prefix: Prefix = "gw"
    """Prefix of every key: fleets that share a server need different ones."""


def _store(written: Any) -> Any:
    return {"url": written} if isinstance(written, str) else written


StoreChoice = Annotated[StoreSection, ShortForm(_store, {"type": "string"})]


class BatchesSection(Section):
    """Files of requests that are processed within a day (docs/batches.md)."""

    file_bytes_max_per_key: Positive = 1024 * 1024 * 1024
    """Total bytes of one API key's files, including those that batches produce."""

    file_keep_s: int = Field(default=EXPIRES_MAX_S, ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)
    """Seconds that a file is kept, unless its caller asks for another time: 3600 (an hour) to 30 days."""

    queued_max_per_key: Positive = 1_000
    """Lines of one API key's batches that may wait or run as jobs; the rest follow as these end."""


class JobsSection(Section):
    """Requests that are submitted now and whose answers are fetched later. Without this section: none."""

    data_dir: Text = "gateway-data"
    """Where jobs are kept if there is no `store`; relative to this file. Created if missing."""

    keep_s: Seconds = 86_400.0
    """Seconds that a result is kept after the job has ended."""

    unstored_keep_s: Seconds = 600.0
    """The same for requests with `store: false`."""

    queued_max_per_key: Positive = 10_000
    """Jobs of one API key that may be waiting or running."""

    bytes_max_per_key: Positive = 1024 * 1024 * 1024
    """Total bytes of one API key's jobs and results."""

    priorities: dict[Slug, Literal["high", "normal", "batch"]] = Field(default_factory=dict)
    """Priority of jobs by API key name; default normal. A caller may ask for less, never for more."""

    work_in_serve: bool = True
    """Whether `serve` runs jobs itself. If not, they wait for a `gemma-gateway worker`."""

    running_max: Positive = 256
    """Jobs that one process may run at once. Each is in memory; they also need slots, as all requests do."""

    attempts_max: Positive = 3
    """Failures after which a job is given up."""

    resume: Literal["continue", "restart"] = "continue"
    """How a job resumes after its backend or worker died: from its stored text if possible, or anew."""

    batches: BatchesSection = Field(default_factory=BatchesSection)
    """Files of requests that are processed within a day (docs/batches.md)."""


class WebhookSection(Section):
    """Your endpoint that is notified when jobs and batches end, by Standard Webhooks (docs/webhooks.md)."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["secret_env"]}, {"required": ["secret_file"]}]}
    )

    url: WebhookUrl
    """Target URL, https://host/path."""

    secret_env: Text | None = None
    """Environment variable with the signing secret, whsec_...; several, space-separated, for rotation."""

    secret_file: Text | None = None
    """File with the signing secret, one per line; relative to this file."""

    events: Events = ("response.*", "batch.*")
    """Events it receives, such as response.completed or batch.*. Unset: all."""

    keys: Names | None = None
    """Names under `keys` of the API keys whose jobs it is told about. Unset: all jobs."""

    allow_private: bool = False
    """Whether its host may resolve to a private or loopback address; otherwise refused."""

    @model_validator(mode="after")
    def _one_place(self) -> "WebhookSection":
        if (self.secret_env is None) == (self.secret_file is None):
            raise ValueError("give secret_env or secret_file, and not both")
        return self


class ReloadSection(Section):
    """Changing the configuration while the gateway runs; SIGHUP always rereads the file."""

    watch: bool = True
    """Whether a changed file is reread automatically. A file that cannot be used changes nothing."""


class ShutdownSection(Section):
    """What happens on SIGTERM."""

    notice_s: Pause = 0.0
    """Seconds for which `/readyz` is 503 while everything is still served: load balancers move away first."""

    drain_s: Seconds = 600.0
    """Seconds that requests get to finish before they end in an error; a second signal ends them at once."""
