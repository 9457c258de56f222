"""Machines on which models take turns: `boxes`."""

from typing import Any, Literal

from pydantic import model_validator

from gateway.core.box import BoxRules
from gateway.core.canary import Canary
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.settings.fields import Command, Positive, Seconds, Section, Slug, Text, Url

_TRIGGER, _SWAPS, _CANARY = Trigger(), SwapRules("", {}), Canary()
_BOX = BoxRules(_SWAPS)


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
