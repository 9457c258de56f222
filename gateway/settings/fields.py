"""Field types of the configuration: numbers with limits, names, addresses, short forms."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import pairwise
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gateway.core import versions
from gateway.core.values import Bound, KneeStep
from gateway.core.versions import VersionBound
from gateway.core.webhooks import EVENT_TYPES
from gateway.profiles.figures import prompt_tokens_max
from gateway.settings.conditions import bounds, count_bounds, header_values
from gateway.tcp import PORT_MAX


class Section(BaseModel):
    """A section of the file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_means_defaults(cls, written: Any) -> Any:
        """A section with all lines commented out is null in YAML; it means the defaults."""
        return {} if written is None else written


@dataclass(frozen=True, slots=True, eq=False)
class ShortForm:
    """Marks a field with a short form; `expand` converts it to the full form before validation.

    Attributes:
        expand: Converts the short form; returns anything else unchanged.
        schema: JSON Schema of the short form.
    """

    expand: Callable[[Any], Any]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the field's own schema preceded by `expand`."""
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema "the short form or the full one"."""
        return {"anyOf": [self.schema, handler(schema)]}


def number(written: Any) -> Any:
    """Return the value unless it is a boolean, which Python treats as a number."""
    if isinstance(written, bool):
        raise ValueError("a number is needed, not true or false")
    return written


WHOLE_MAX = 2**53
"""The largest integer; up to it, integers are exact as floats, to which most figures are converted."""

SECONDS_MAX = 315_360_000
"""Ten years. A choice: longer than anything here lasts, and short enough for every timer and for Redis to
count."""


def _countable(number: int) -> int:
    if number > WHOLE_MAX:
        raise ValueError(f"it must be at most {WHOLE_MAX:,}")
    return number


Positive = Annotated[int, Field(ge=1), BeforeValidator(number), AfterValidator(_countable)]
Knee = Annotated[int, Field(ge=1, lt=1000), BeforeValidator(number)]  # core/admission.py counts up to 999
Count = Annotated[int, Field(ge=0), BeforeValidator(number), AfterValidator(_countable)]
Attempts = Annotated[int, Field(ge=1, le=10), BeforeValidator(number)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False), BeforeValidator(number)]
Pause = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False), BeforeValidator(number)]
Weight = Annotated[float, Field(ge=0, le=1_000_000), BeforeValidator(number)]  # sums stay finite
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(number)]
Figure = Annotated[float, Field(ge=0, le=1000), BeforeValidator(number)]  # to the power of `Sharpness`, too
Accepted = Annotated[float, Field(ge=1, le=1000), BeforeValidator(number)]
Sharpness = Annotated[float, Field(ge=1, le=20), BeforeValidator(number)]
"""Numbers in the file. Their upper limits are choices, far above any real value: arithmetic stays finite."""


_SLUG = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


def _slug(name: str) -> str:
    if not re.fullmatch(_SLUG, name):
        raise ValueError(
            "names are made of letters, digits, '-', '_' and '.', and start with a letter or digit: "
            "they become metric labels and header values"
        )
    return name


Slug = Annotated[str, AfterValidator(_slug), Field(json_schema_extra={"pattern": _SLUG})]
Text = Annotated[str, Field(min_length=1)]


_PREFIX = r"^[A-Za-z0-9_-]{1,32}$"


def _prefix(written: str) -> str:
    if not re.fullmatch(_PREFIX, written):
        raise ValueError("a prefix is 1 to 32 letters, digits, '-' and '_'")
    return written


Prefix = Annotated[str, AfterValidator(_prefix), Field(json_schema_extra={"pattern": _PREFIX})]


def _sha256(written: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", written):
        raise ValueError("a SHA-256 is 64 hex digits")
    return written


Sha256 = Annotated[str, AfterValidator(_sha256), Field(json_schema_extra={"pattern": "^[0-9a-fA-F]{64}$"})]


class Address(NamedTuple):
    """The address of a listener."""

    host: str
    port: int


def address(written: str) -> Address:
    """Parse `host:port` or `[v6]:port`; port 0 lets the system choose one.

    Raises:
        ValueError: the syntax is invalid.
    """
    host, _, port = written.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if (
        bare in {"", "*"}  # getaddrinfo treats "*" like an empty name, which is loopback
        or not port.isascii()
        or not port.isdigit()
        or int(port) > PORT_MAX
        or (":" in bare and not bracketed)
    ):
        raise ValueError("write it as host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080")
    return Address(bare, int(port))


_WILDCARDS = {"0.0.0.0": 4, "::": 0}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def overlap(one: Address, other: Address) -> bool:
    """Return whether two listeners cannot have these addresses. Of names, only localhost is resolved."""
    if one.port != other.port or not one.port:
        return False
    hosts = {one.host.lower(), other.host.lower()}
    if len(hosts) == 1 or ("localhost" in hosts and hosts <= _LOOPBACK):
        return True
    return any(
        _WILDCARDS[host] in {0, _version(rest)}
        for host in hosts & _WILDCARDS.keys()
        for rest in hosts - {host}
    )


def _version(host: str) -> int:
    """Return the IP version of a host; names count as 4."""
    return 6 if ":" in host else 4


def _address_text(written: Any) -> Any:
    if isinstance(written, int) and not isinstance(written, bool):
        raise ValueError(f"write it as host:port, such as 127.0.0.1:{written}")
    if isinstance(written, str):
        address(written)
    return written


AddressText = Annotated[str, BeforeValidator(_address_text)]


def _off(written: Any) -> Any:
    return None if written is False or written == "off" else written


OptionalAddress = Annotated[
    AddressText | None,
    ShortForm(_off, {"enum": ["off", False]}),
]


_FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")


def _no_false_address(host: str) -> None:
    """Raise ValueError for four numbers that are no address: 10.0.0.256, or 010.0.0.1 (to some 8.0.0.1)."""
    if _FOUR_NUMBERS.fullmatch(host):
        try:
            IPv4Address(host)
        except ValueError:
            message = "its host is no IP address: four numbers from 0 to 255, without zeros before them"
            raise ValueError(message) from None


def _split(written: str, example: str) -> SplitResult:
    """Split a URL. Messages, here and below, never contain it, because it may hold a password."""
    try:
        url = urlsplit(written)
        _ = url.port
    except ValueError:
        raise ValueError(f"this is not a URL; write it as {example}") from None
    return url


def _base_url(written: str) -> str:
    """Return the URL without a trailing slash."""
    url = _split(written, "http://host:port")
    host = url.hostname
    if "$" in (host or ""):
        raise ValueError("a variable is written as ${NAME}, with braces")
    if url.scheme not in {"http", "https"} or not host or url.port == 0:
        raise ValueError("write it as http://host:port or https://host:port")
    _no_false_address(host)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; name the key with api_key_env or api_key_file")
    if url.path.rstrip("/") == "/v1":
        raise ValueError("leave /v1 out: the gateway appends it")
    if url.path not in {"", "/"} or url.query or url.fragment:
        raise ValueError("only scheme, host and port; a backend is a whole server, not a path on one")
    return written.rstrip("/")


_HTTP = Field(json_schema_extra={"pattern": "^(https?://|.*\\$\\{)"})

BaseUrl = Annotated[str, AfterValidator(_base_url), _HTTP]


def _url(written: str) -> str:
    url = _split(written, "http://host:port/path")
    if url.scheme not in {"http", "https"} or not url.hostname or url.fragment:
        raise ValueError("write it as http://host:port/path or https://host:port/path")
    _no_false_address(url.hostname)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; name the variable with them (token_env, headers_env)")
    return written


Url = Annotated[str, AfterValidator(_url), _HTTP]


def _versions(written: Any) -> Any:
    if not isinstance(written, str):
        raise ValueError('write it in quotes, as ">= 0.20, < 0.24"')
    return versions.bounds(written)


Versions = Annotated[
    tuple[VersionBound, ...],
    PlainValidator(_versions),
    WithJsonSchema({"type": "string", "minLength": 1}),
]
"""A range of engine versions."""


def _store_url(written: str) -> str:
    url = _split(written, f"redis://host:6379/0. {_ESCAPED}")
    if url.scheme not in {"redis", "rediss", "unix"} or not (url.hostname or url.path):
        raise ValueError("write it as redis://host:6379/0, rediss://host:6379/0 or unix:///path")
    if url.scheme == "unix":
        return written
    if not url.hostname or url.fragment or "@" in url.path + url.query:
        raise ValueError(f"write it as redis://host:6379/0. {_ESCAPED}")
    if not re.fullmatch(r"/?[0-9]*", url.path):
        raise ValueError("what follows host and port is the number of a database, as in redis://host:6379/0")
    return written


_ESCAPED = "In a password, write % as %25, / as %2F, ? as %3F, # as %23 and @ as %40"

StoreUrl = Annotated[
    str,
    AfterValidator(_store_url),
    Field(json_schema_extra={"pattern": "^(rediss?://|unix:|.*\\$\\{)"}),
]


_HOST = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")

_URL_MAX = 2048
"""Maximum characters of a URL. A choice: common servers take as many."""


def _webhook_url(written: str) -> str:
    url = _split(written, "https://host/path")
    if url.scheme not in {"http", "https"} or not url.hostname or url.port == 0:
        raise ValueError("write it as https://host/path")
    _no_false_address(url.hostname)
    if url.username is not None or url.password is not None:
        raise ValueError("no credentials in URLs; a webhook is signed, and its receiver checks that")
    if not written.isascii() or not written.isprintable() or " " in written:
        raise ValueError("a URL has ASCII letters only; write others percent-encoded, hosts as xn--")
    if not _HOST.fullmatch(url.netloc) or len(written) > _URL_MAX:
        raise ValueError(f"write it as https://host/path, in at most {_URL_MAX:,} characters")
    if url.fragment:
        raise ValueError("a fragment (#...) is never sent; leave it out")
    return written


WebhookUrl = Annotated[str, AfterValidator(_webhook_url), _HTTP]

_ORIGIN = 'write it as https://host or https://host:port, or "*" alone for every origin'
_USUAL_PORTS = {"http": 80, "https": 443}


def _origin(written: str) -> str:
    """Validate `*` or an origin as sent by browsers; in any other form it would never match."""
    if written == "*":
        return written
    try:
        url = urlsplit(written)
        port = url.port
    except ValueError:
        raise ValueError(f"this is not an origin; {_ORIGIN}") from None
    if "*" in written:
        raise ValueError(f"there are no patterns: name each origin; {_ORIGIN}")
    if not url.netloc or "://" not in written:
        raise ValueError(f"an origin begins with its scheme; {_ORIGIN}")
    if not _HOST.fullmatch(url.netloc):
        raise ValueError(f"a host has ASCII letters only, others as xn--, and no credentials; {_ORIGIN}")
    bare = f"{url.scheme}://{url.netloc.lower()}"
    if written.lower() != bare:
        raise ValueError(f"an origin ends with its host or port, without even a slash: write {bare}")
    if url.netloc.endswith(":") or port == _USUAL_PORTS.get(url.scheme, -1):
        bare = bare.rpartition(":")[0]
        raise ValueError(f"browsers leave the usual port of a scheme out: write {bare}")
    return bare


Origin = Annotated[
    str,
    AfterValidator(_origin),
    Field(json_schema_extra={"pattern": r"^(\*$|[A-Za-z][A-Za-z0-9+.-]*://[^/]+$|.*\$\{)"}),
]

_EVENTS = ("response.*", "batch.*", *EVENT_TYPES)


def _event(written: str) -> str:
    if written not in _EVENTS:
        raise ValueError(f"there is no such event; there are {', '.join(_EVENTS)}")
    return written


_COMPARISON = {"title": "comparison", "type": "string", "pattern": r"^\s*(>=|>|<=|<|==|=)?\s*[0-9].*$|\$\{"}
_COMPARISONS: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        _COMPARISON,
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [{"type": "integer", "minimum": 0}, _COMPARISON]},
        },
    ]
}

Comparisons = Annotated[tuple[Bound, ...], PlainValidator(bounds), WithJsonSchema(_COMPARISONS)]
"""A numeric condition."""

CountComparisons = Annotated[
    tuple[Bound, ...],
    PlainValidator(count_bounds),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, *_COMPARISONS["anyOf"]]}),
]
"""A condition on a count: also true (any) and false (none)."""

HeaderValues = Annotated[
    tuple[str, ...],
    PlainValidator(header_values),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": True},
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]


def _one_or_many(written: Any) -> Any:
    return [written] if isinstance(written, str) else written


Command = Annotated[
    tuple[Text, ...],
    Field(min_length=1),
    ShortForm(_one_or_many, {"type": "string"}),
]
"""A command: a list of its words, or one text for a shell."""

Names = Annotated[
    tuple[Slug, ...],
    Field(min_length=1),
    ShortForm(_one_or_many, {"type": "string"}),
]
"""A name, or a list of names."""

Events = Annotated[
    tuple[Annotated[str, AfterValidator(_event), Field(json_schema_extra={"enum": list(_EVENTS)})], ...],
    Field(min_length=1),
    ShortForm(_one_or_many, {"enum": list(_EVENTS)}),
]
"""A type of event, or a list of them."""
OriginNames = Annotated[tuple[Origin, ...], ShortForm(_one_or_many, {"type": "string"})]
"""Origins of web pages: none, one, or a list."""

QuirkNames = Annotated[tuple[Text, ...], ShortForm(_one_or_many, {"type": "string"})]
"""Names of quirks: none, one, or a list."""


def _upper_end(written: Any) -> Any:
    if isinstance(written, str):
        prompt_tokens_max(written)
    return written


class KneeStepSection(Section):
    """One step of a knee curve."""

    prompt_tokens: Annotated[str, AfterValidator(_upper_end)] | None = None
    """Longest prompt it applies to, as "<= 2000". The last step has none: it covers the rest."""

    seqs: Knee
    """The knee at that length: sequences at once that still raise throughput."""

    @property
    def step(self) -> KneeStep:
        """The step as a core value."""
        upper = self.prompt_tokens
        return KneeStep(None if upper is None else prompt_tokens_max(upper), self.seqs)


def _knee(written: Any) -> Any:
    if isinstance(written, int | str) and not isinstance(written, bool):
        return [{"seqs": written}]
    if isinstance(written, float):
        raise ValueError("a whole number or a list is needed")
    return written


def _ascending(steps: tuple[KneeStepSection, ...]) -> tuple[KneeStepSection, ...]:
    uppers = [step.step.prompt_tokens_max for step in steps]
    if not uppers or uppers[-1] is not None or None in uppers[:-1]:
        raise ValueError(
            "the last step, and only the last, has no prompt_tokens: it is for all longer prompts"
        )
    lengths = [upper for upper in uppers if upper is not None]
    if any(later <= earlier for earlier, later in pairwise(lengths)):
        raise ValueError("the steps must go from short prompts to long ones")
    return steps


KneeCurve = Annotated[
    tuple[KneeStepSection, ...],
    AfterValidator(_ascending),
    ShortForm(_knee, {"type": "integer", "minimum": 1, "exclusiveMaximum": 1000}),
]
"""A knee: one number for every prompt length, or a curve."""


def curve(steps: tuple[KneeStepSection, ...]) -> tuple[KneeStep, ...]:
    """Return a knee curve as core values."""
    return tuple(step.step for step in steps)
