"""Explains where a request would go and why, offline or by asking a running gateway, for the terminal."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import command_http, what_if
from gateway.commands import PIPED_WIDTH
from gateway.core import deciding
from gateway.core.decision import Exclusion
from gateway.core.errors import GatewayError
from gateway.downstream import wire
from gateway.settings import Settings
from gateway.tokenizer import open_estimator
from gateway.what_if import Explanation


class NotAnswered(Exception):
    """The admin port did not return an explanation. The message says why."""


async def explain(
    settings: Settings,
    body: bytes,
    *,
    key: str | None,
    headers: Mapping[str, str],
) -> Explanation:
    """Return the decision for a request body on an idle, healthy fleet.

    Raises:
        ConfigError: the vocabulary cannot be used.
        CallerError: the gateway would reject the request before considering backends.
    """
    policy = settings.policy()
    asked = what_if.read(settings, body, key=key, headers=headers)
    request = asked.incoming.request
    model = deciding.model_of(policy, request.model)
    estimator = open_estimator(settings.named.vocab)
    try:
        prompt = deciding.prompt_of(policy, asked.incoming)
        estimate = await estimator.estimate(prompt, model.template, policy.window_tokens)
    finally:
        estimator.close()
    found = what_if.decided(policy, request, estimate, deciding.idle(policy), job=asked.job)
    return replace(found, dropped=tuple(asked.incoming.dropped), notes=(*found.notes, *asked.notes))


def ask(
    admin_url: str,
    body: bytes,
    *,
    key: str | None,
    headers: Mapping[str, str],
    config: bytes | None,
    config_name: str,
) -> Mapping[str, Any]:
    """Return the decision of a running gateway for a request body, on its fleet in its current state.

    `config`: contents of another configuration to decide under; `config_name`: its file, for errors.

    Raises:
        NotAnswered: it is unreachable, or its answer is not an explanation.
        GatewayError: the error it would return for such a request.
    """
    question: dict[str, Any] = {
        "request": wire.members_of(body, values_max=len(body)),  # the gateway says if these are too many
        "key": key,
        "headers": headers,
    }
    if config is not None:
        question |= {"config": config.decode("utf-8", "replace"), "config_name": config_name}
    url = f"{admin_url.rstrip('/')}/admin/explain"
    try:
        content = msgspec.json.encode(question)
        answer = command_http.request("POST", url, timeout_s=command_http.ADMIN_S, content=content)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NotAnswered(f"{url}: {error}") from error
    foreign = f"{url}: not the answer of a gateway (status {answer.status_code})"  # a proxy, another program
    try:
        found = answer.json()
    except ValueError as error:
        raise NotAnswered(foreign) from error
    if answer.status_code != 200 and (message := _message(found)):
        raise NotAnswered(f"{url}: {message}")
    if answer.status_code == 200 and isinstance(found, dict):
        if isinstance(found.get("decision"), dict):
            return found
        if isinstance(refused := found.get("refused"), dict):
            raise _Refused(refused)
    raise NotAnswered(foreign)


class _Refused(GatewayError):
    """The error a running gateway would return."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__(told["message"], code=told["code"])
        self.status = int(told["status"])


def _message(found: object) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def is_served(found: Mapping[str, Any]) -> bool:
    """Return whether any backend could take the request now, or it would wait for one."""
    return not found.get("refused") and (_starts(found) or bool(_waited_for(found)))


def _starts(found: Mapping[str, Any]) -> bool:
    return any(candidate["excluded"] is None for candidate in found["decision"]["candidates"])


def _waited_for(found: Mapping[str, Any]) -> list[str]:
    """Return the backends that cannot take the request now and are worth waiting for."""
    excluded = {
        candidate["backend"]: Exclusion(candidate["excluded"])
        for candidate in found["decision"]["candidates"]
        if candidate["excluded"] is not None
    }
    is_queued = found.get("is_queued", False)  # older gateways do not say so
    return [name for name, why in excluded.items() if why.is_busy or (is_queued and not why.is_permanent)]


_SCORES = {"spare knee": "spare_knee", "speed": "speed", "affinity": "prefix_affinity"}


_RARE = {"saved, s": "prefill_saved_s", "slow context": "slow_context"}
"""Shown only where one is not 0."""


def show(found: Mapping[str, Any]) -> None:
    """Print an explanation, given as JSON, for people."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    decision = found["decision"]
    estimate, demand = decision["estimate"], decision["demand"]
    console.print(
        f"[bold]{estimate['tokens']}[/] prompt tokens ({estimate['mode']}, at most {estimate['tokens_max']})"
        f", {demand['total_tokens']} with output"
    )
    if found["dropped"]:
        console.print(f"dropped members: {escape(', '.join(found['dropped']))}")
    for change in found["changes"]:
        console.print(f"[dim]changed:[/] {escape(change)}")
    for verdict in found["classes"]:
        mark = "[green]✓[/]" if verdict["matched"] else "[dim]·[/]"
        console.print(f"{mark} class {escape(verdict['name'])}: {escape(verdict['why'])}")
    console.print(_table(decision["candidates"]))
    outlook = found["outlook"]
    if refused := found.get("refused"):  # older gateways do not say so
        answer = f"{refused['status']} {refused['code']}: {refused['message']}"
        console.print(f"[bold red]refused[/]: the gateway would answer {escape(answer)}")
    elif _starts(found):
        first = decision["candidates"][0]
        console.print(f"goes to [bold green]{escape(first['backend'])}[/] (pool {escape(first['pool'])})")
    elif waited_for := _waited_for(found):
        most_s = None if outlook is None else outlook.get("max_wait_s")
        most = "" if most_s is None else f", for up to {most_s:g} s"
        if outlook is not None and not outlook["waiting"]:
            most += _about(outlook["expected_wait_s"])
        console.print(f"[bold yellow]waits[/] for {escape(' or '.join(waited_for))}{most}")
    else:
        console.print("[bold red]nowhere[/]: no backend of its class can take it")
    if outlook is not None and outlook["waiting"]:
        about = _about(outlook["expected_wait_s"])
        console.print(f"behind {outlook['waiting']} waiting{about}")
    for note in found["notes"]:
        console.print(f"[dim]{escape(note)}[/]")


def _about(wait_s: float | None) -> str:
    return "" if wait_s is None else f", about {wait_s:.1f} s"


def _table(candidates: list[Mapping[str, Any]]) -> Table:
    shown = dict(_SCORES)
    for title, score in _RARE.items():
        if any(candidate["scores"].get(score) for candidate in candidates):
            shown[title] = score
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "backend", "pool", "score", *shown, "why not"):
        table.add_column(column, overflow="fold")  # replicas differ in the last letter of their names
    for position, candidate in enumerate(candidates, 1):
        backend, pool = escape(candidate["backend"]), escape(candidate["pool"])
        if candidate["excluded"] is not None:
            why = escape(f"{candidate['excluded']}: {candidate['detail']}")
            cells = ("-", *("" for _ in shown), why)
            table.add_row("", backend, pool, *cells, style="dim")
            continue
        scores = [f"{candidate['scores'][name]:.2f}" for name in shown.values()]
        style = "green" if position == 1 else None
        why = escape(candidate["detail"])
        table.add_row(str(position), backend, pool, f"{candidate['score']:.2f}", *scores, why, style=style)
    return table
