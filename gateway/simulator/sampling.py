"""Sampling parameters: which of them matter to the simulation, and what vLLM refuses in the others.

The limits and the words are those of vLLM 0.33.0 (its SamplingParams and request models), compared with a
real server.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from pydantic_core import SchemaValidator
from pydantic_core.core_schema import list_schema, str_schema, union_schema

from gateway.core.value import valueclass
from gateway.simulator.reading import Members
from gateway.simulator.refusals import bad_request

_LOGPROBS_MAX = 20
"""vLLM's default of `--max-logprobs`."""

_CHOICES_MAX = 16_384
"""vLLM's default of VLLM_MAX_N_SEQUENCES."""

_STOPS_MAX = 4
"""vLLM's default of VLLM_MAX_STOP_STRINGS."""

_STOP = SchemaValidator(  # without labels: vLLM's answer does not name the alternatives
    union_schema([(str_schema(), ""), (list_schema(str_schema(), max_length=_STOPS_MAX), "")])
)

_INT64_MAX = 2**63 - 1

_VOCABULARY = 262_144
"""Entries of Gemma's vocabulary."""

_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")


@valueclass(frozen=True, slots=True)
class _Range:
    """What a number must be; `least` and `most` are allowed themselves unless `is_above`."""

    least: float
    most: float
    words: str
    is_above: bool = False
    is_named: bool = False

    def check(self, name: str, value: float) -> None:
        too_small = value <= self.least if self.is_above else value < self.least
        if too_small or value > self.most:
            text = f"{name} must be {self.words}, got {value}."
            raise bad_request(text, name, value) if self.is_named else bad_request(text)


_RANGES: tuple[tuple[str, _Range], ...] = (
    ("presence_penalty", _Range(-2, 2, "in [-2, 2]")),
    ("frequency_penalty", _Range(-2, 2, "in [-2, 2]")),
    ("repetition_penalty", _Range(0, inf, "greater than zero", is_above=True)),
    ("temperature", _Range(0, inf, "non-negative", is_named=True)),
    ("temperature", _Range(0, 2, "in [0, 2]", is_named=True)),
    ("top_p", _Range(0, 1, "in (0, 1]", is_above=True, is_named=True)),
    ("top_k", _Range(-1, inf, "0 (disable), or at least 1")),
    ("min_p", _Range(0, 1, "in [0, 1]")),
)


@valueclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters that matter to the simulation or to validation.

    Attributes:
        choices: `n`.
        numbers: Those with a range, by name.
        top_logprobs: How many alternatives of each token are asked for.
        seed: For the dice.
        truncate: Most prompt tokens; the others are cut off.
        min_tokens: Of the answer.
        ignore_eos: Whether to answer until `max_tokens`.
        stops: Texts at which the answer ends.
        keep_stop: Whether it ends with that text.
        skip_special: Whether markers are left out of the answer.
    """

    choices: int
    numbers: Mapping[str, float]
    top_logprobs: int | None
    seed: int | None
    truncate: int | None
    min_tokens: int
    ignore_eos: bool
    stops: tuple[str, ...]
    keep_stop: bool
    skip_special: bool

    def check(self, max_tokens: int | None, window: int) -> None:
        """Raise the `Refusal` for values that vLLM does not take.

        `window`: context of the model, in tokens.
        """
        if max_tokens is not None and max_tokens > window:
            raise bad_request(
                f"max_tokens={max_tokens} cannot be greater than max_model_len={window}. "
                "Please request fewer output tokens.",
                "max_tokens",
                max_tokens,
            )
        if self.choices < 1:
            raise bad_request(f"n must be at least 1, got {self.choices}.")
        if self.choices > _CHOICES_MAX:
            raise bad_request(
                f"n must be at most {_CHOICES_MAX}, got {self.choices}. "
                "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
            )
        for name, allowed in _RANGES:
            if (value := self.numbers.get(name)) is not None:
                allowed.check(name, value)
        self._check_tokens(max_tokens)
        if "" in self.stops:
            raise bad_request("stop cannot contain an empty string.")
        if self.top_logprobs is not None and self.top_logprobs > _LOGPROBS_MAX:
            text = (
                f"Requested sample logprobs of {self.top_logprobs}, "
                f"which is greater than max allowed: {_LOGPROBS_MAX}"
            )
            raise bad_request(text, "logprobs", self.top_logprobs)

    def _check_tokens(self, max_tokens: int | None) -> None:
        if max_tokens is not None and max_tokens < 1:
            text = f"max_tokens must be at least 1, got {max_tokens}."
            raise bad_request(text, "max_tokens", max_tokens)
        if self.min_tokens < 0:
            raise bad_request(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if max_tokens is not None and self.min_tokens > max_tokens:
            text = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {self.min_tokens}."
            raise bad_request(text)


def read_sampling(members: Members) -> Sampling:
    """Return the sampling parameters of a request; what has another type is noted in `members`."""
    choices, top_k = members.integer("n"), members.integer("top_k")
    numbers = {name: value for name in _NUMBERS if (value := members.number(name)) is not None}
    if top_k is not None:
        numbers["top_k"] = top_k
    for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
        members.array(name)
    return Sampling(
        choices=1 if choices is None else choices,
        numbers=numbers,
        top_logprobs=members.integer("top_logprobs"),
        seed=members.integer("seed", -_INT64_MAX - 1, _INT64_MAX),
        truncate=_truncate(members),
        min_tokens=members.integer("min_tokens") or 0,
        ignore_eos=members.boolean("ignore_eos"),
        stops=_stops(members),
        keep_stop=members.boolean("include_stop_str_in_output"),
        skip_special=members.boolean("skip_special_tokens", True),
    )


def check_asked(data: Mapping[str, Any]) -> None:
    """Raise the `Refusal` for what vLLM looks at before it reads the members of a chat."""
    most = data.get("top_logprobs")
    if most is not None:
        if not isinstance(most, int | float):
            raise bad_request("`top_logprobs` must be an integer.", "top_logprobs", most)
        if most < 0 and most != -1:
            raise bad_request("`top_logprobs` must be a positive value or -1.", "top_logprobs", most)
        if most and not data.get("logprobs"):
            text = "when using `top_logprobs`, `logprobs` must be set to true."
            raise bad_request(text, "top_logprobs")


def check_tokens(data: Mapping[str, Any]) -> None:
    """Raise the `Refusal` for tokens that are not in the vocabulary."""
    bias = data.get("logit_bias")
    if isinstance(bias, Mapping):
        odd, unknown = [], []
        for name in bias:
            try:
                token = int(name)
            except ValueError:
                odd.append(name)
            else:
                unknown += [] if 0 <= token < _VOCABULARY else [token]
        if odd:
            text = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {odd}"
            raise bad_request(text, "logit_bias", odd)
        if unknown:
            text = f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids. "
            raise bad_request(f"{text}Vocabulary size: {_VOCABULARY}", "logit_bias", unknown)
    if data.get("allowed_token_ids") == []:
        raise bad_request("allowed_token_ids is not None and empty!", "allowed_token_ids", [])


def _truncate(members: Members) -> int | None:
    most = members.integer("truncate_prompt_tokens", -1)
    return most if most is not None and most > 0 else None


def _stops(members: Members) -> tuple[str, ...]:
    """Return the stop strings; vLLM takes one, or a list of some."""
    stop: str | list[str] | None = members.read("stop", _STOP)
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
