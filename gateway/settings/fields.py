"""Field types of the configuration: numbers with limits, names, conditions, short forms."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

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
from gateway.core.backends import KneeStep
from gateway.core.policy import Bound
from gateway.core.versions import VersionBound
from gateway.core.webhooks import EVENT_TYPES
from gateway.profiles.figures import prompt_tokens_max
from gateway.settings.conditions import WHOLE_MAX, bounds, count_bounds, header_name, header_values


class Section(BaseModel):
    """A section of the file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

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


def _matching(pattern: str, complaint: str) -> AfterValidator:
    def check(written: str) -> str:
        if not re.fullmatch(pattern, written):
            raise ValueError(complaint)
        return written

    return AfterValidator(check)


_SLUG, _PREFIX, _SHA256 = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", r"^[A-Za-z0-9_-]{1,32}$", "^[0-9a-fA-F]{64}$"
_NAME_RULE = (
    "names are made of letters, digits, '-', '_' and '.', and start with a letter or digit: "
    "they become metric labels and header values"
)
_PREFIX_RULE = "a prefix is 1 to 32 letters, digits, '-' and '_'"
_SHA256_RULE = "a SHA-256 is 64 hex digits, without the `-` that sha256sum prints behind them"

Slug = Annotated[str, _matching(_SLUG, _NAME_RULE), Field(json_schema_extra={"pattern": _SLUG})]
Prefix = Annotated[str, _matching(_PREFIX, _PREFIX_RULE), Field(json_schema_extra={"pattern": _PREFIX})]
Sha256 = Annotated[str, _matching(_SHA256, _SHA256_RULE), Field(json_schema_extra={"pattern": _SHA256})]
Text = Annotated[str, Field(min_length=1)]


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

HeaderName = Annotated[str, AfterValidator(header_name)]

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


def _each_once(written: Any) -> Any:
    if isinstance(written, dict):
        seen: dict[str, str] = {}
        for name in written:
            first = seen.setdefault(str(name).lower(), name)
            if first is not name:
                raise ValueError(f"{first} and {name} are one header: give its values as a list")
    return written


Headers = Annotated[dict[HeaderName, HeaderValues], BeforeValidator(_each_once)]
"""Accepted values of headers by name, in which case does not matter."""


def one_or_many(written: Any) -> Any:
    """Return a list of one if it is a text. For `ShortForm`."""
    return [written] if isinstance(written, str) else written


Command = Annotated[tuple[Text, ...], Field(min_length=1), ShortForm(one_or_many, {"type": "string"})]
"""A command: a list of its words, or one text for a shell."""

Names = Annotated[tuple[Slug, ...], Field(min_length=1), ShortForm(one_or_many, {"type": "string"})]
"""A name, or a list of names."""

Events = Annotated[
    tuple[Annotated[str, AfterValidator(_event), Field(json_schema_extra={"enum": list(_EVENTS)})], ...],
    Field(min_length=1),
    ShortForm(one_or_many, {"enum": list(_EVENTS)}),
]
"""A type of event, or a list of them."""
QuirkNames = Annotated[tuple[Text, ...], ShortForm(one_or_many, {"type": "string"})]
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
