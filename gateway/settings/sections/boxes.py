"""Machines on which models take turns: `boxes`.

The sources of defaults are in `core.box`, `core.canary` and `core.swap_policy`. `timeout_s` of a start
or stop is a choice: commands return at once.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, field_validator, model_validator

from gateway.core.box import BoxRules
from gateway.core.canary import Canary
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.settings.addresses import Url
from gateway.settings.fields import Command, Positive, Seconds, Section, Slug, Text, number

_TRIGGER, _SWAPS, _CANARY = Trigger(), SwapRules("", {}), Canary()
_BOX = BoxRules(_SWAPS)


class ExecSection(Section):
    """Commands on this machine that start and stop a model, for example over ssh."""

    start: Command
    """Starts it and returns without waiting until it answers: a list of words. It may be run again."""

    stop: Command
    """Stops it and returns when its memory is free. Must succeed if there is nothing to stop."""

    shell: bool = False
    """Run the commands with /bin/sh; each is then a single string."""

    timeout_s: Seconds = 60.0
    """Seconds a command may take; after that it is killed and counts as failed."""

    kill_with_gateway: bool = False
    """Whether to kill a command that still runs when the gateway exits. If not, it is left to finish."""

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
    """HTTP method."""

    url: Url
    """Full URL, including path and query."""

    body: dict[str, Any] | None = None
    """JSON body to send. Unset: no body."""

    @field_validator("body")
    @classmethod
    def _can_be_sent(cls, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """YAML has dates, bytes and numbers that JSON has not."""
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"this cannot be sent as JSON ({error}); put text in quotes") from None
        return body


class HttpSection(Section):
    """HTTP requests that start and stop a model: llama-swap, or your own agent on the box."""

    start: RequestSection
    """Starts it. It may be sent more than once."""

    stop: RequestSection
    """Stops it; must answer when its memory is free, and succeed if there is nothing to stop."""

    token_env: Text | None = None
    """Environment variable that holds a token, sent as `authorization: Bearer`."""

    timeout_s: Seconds = 60.0
    """Seconds a request may take. Some agents answer only once the model is up."""


def _level(written: Any) -> Any:
    """Return a level from `${VAR}`, which is text, as a number."""
    return int(written) if written in ("1", "2") else number(written)


class SleepSection(Section):
    """vLLM's sleep mode: the server keeps running, its memory is freed. Needs VLLM_SERVER_DEV_MODE=1."""

    level: Annotated[Literal[1, 2], BeforeValidator(_level)] = 1
    """1 keeps the weights in host memory; 2 reloads them on wake-up, and frees more on unified memory."""

    timeout_s: Seconds = 60.0
    """Seconds that going to sleep or waking up may take."""


class CanarySection(Section):
    """A test question after every boot, before the model serves: a healthy server may answer nonsense."""

    prompt: Text = _CANARY.prompt
    """The question, at temperature 0."""

    expect: Text = _CANARY.expect
    """What the answer must contain; case is ignored."""

    reasoning: bool = _CANARY.reasoning
    """Ask for reasoning; it must not be empty."""

    max_tokens: Positive = _CANARY.max_tokens
    """Tokens the answer may have, reasoning included."""

    timeout_s: Seconds = _CANARY.timeout_s
    """Seconds the answer may take."""


class MemberSection(Section):
    """One model of the box: how it is started and stopped (in exactly one of three ways), and when."""

    exec: ExecSection | None = None
    """Start and stop it by commands."""

    http: HttpSection | None = None
    """Start and stop it by HTTP requests."""

    sleep: SleepSection | None = None
    """Start and stop it by vLLM's sleep mode."""

    jobs: Positive = _TRIGGER.jobs
    """Number of requests waiting for it that starts a swap."""

    max_wait_s: Seconds = _TRIGGER.wait_s
    """Seconds after which a single request waiting for it starts a swap."""

    canary: CanarySection = CanarySection()
    """Test question that it must answer before it serves."""

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
    """The backend whose model is resident when there is no work."""

    boot_budget_s: Seconds = _BOX.boot_budget_s
    """Seconds from starting a model to its first answer; if it takes longer, it is quarantined."""

    residency_s: Seconds = _SWAPS.residency_s
    """Minimum seconds a model stays resident after a swap."""

    idle_s: Seconds = _SWAPS.idle_s
    """Seconds without work after which the box returns to the default."""

    launch_record: Text | None = None
    """File with a hash of every start command, used to warn when one changes; relative to this file."""

    @model_validator(mode="after")
    def _several(self) -> "BoxSection":
        if len(self.backends) < 2:
            raise ValueError("a box needs two backends or more: they take turns")
        return self
