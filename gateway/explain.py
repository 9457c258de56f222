"""Why a request would go where it would go: the gateway's own decision, without sending anything."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from gateway.core import classification, deciding
from gateway.core.values import Decision, Endpoint
from gateway.downstream import wire
from gateway.parts import wire_rules
from gateway.ports import Arrival
from gateway.settings import Settings
from gateway.tokenizer import open_estimator

_NOW = Arrival("req-explained", 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ClassVerdict:
    """One class of the model: whether it matched, and why or why not."""

    name: str
    matched: bool
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with what led to it."""

    classes: tuple[ClassVerdict, ...]
    decision: Decision
    dropped: tuple[str, ...]

    @property
    def is_served(self) -> bool:
        """Whether any backend could take the request."""
        return bool(self.decision.ranked)

    def as_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2)


async def explain(
    settings: Settings,
    body: bytes,
    *,
    completions: bool = False,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Explanation:
    """Return the decision for a request body on an idle, healthy fleet.

    Raises:
        ConfigError: the vocabulary cannot be used.
        CallerError: the gateway would refuse the request before looking at backends.
    """
    policy = settings.policy()
    endpoint = Endpoint.COMPLETIONS if completions else Endpoint.CHAT
    incoming = wire.read(endpoint, body, wire_rules(settings), arrival=_NOW, key=key, headers=headers)
    request = incoming.request
    model = deciding.model_of(policy, request.model)
    estimator = open_estimator(settings.vocab)
    try:
        estimate = await estimator.estimate(request.prompt, model.template, policy.window_tokens)
    finally:
        estimator.close()
    traffic_class, decision = deciding.decide(
        policy, model, request, estimate, lambda _: deciding.idle(policy)
    )
    verdicts = [
        ClassVerdict(one.name, matched=True, why=decision.class_reason)
        if one is traffic_class
        else ClassVerdict(
            one.name,
            matched=False,
            why=classification.mismatch(model, one, request, estimate) or "would match, but stands below",
        )
        for one in model.classes
    ]
    return Explanation(tuple(verdicts), decision, tuple(incoming.dropped))


_SCORES = {"spare knee": "spare_knee", "speed": "speed", "affinity": "prefix_affinity"}


def show(explanation: Explanation, console: Console | None = None) -> None:
    """Print an explanation for a person."""
    console = console or Console(highlight=False)
    decision = explanation.decision
    estimate, demand = decision.estimate, decision.demand
    console.print(
        f"[bold]{estimate.tokens}[/] prompt tokens ({estimate.mode.value}, at most {estimate.tokens_max}), "
        f"{demand.total_tokens} with output"
    )
    if explanation.dropped:
        console.print(f"dropped members: {', '.join(explanation.dropped)}")
    for verdict in explanation.classes:
        mark = "[green]✓[/]" if verdict.matched else "[dim]·[/]"
        console.print(f"{mark} class {verdict.name}: {verdict.why}")
    shown = dict(_SCORES)
    if any(candidate.scores.get("slow_context") for candidate in decision.candidates):
        shown["slow context"] = "slow_context"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "backend", "pool", "score", *shown, "why not"):
        table.add_column(column)
    for position, candidate in enumerate(decision.candidates, 1):
        if candidate.excluded is not None:
            cells = ("-", *("" for _ in shown), f"{candidate.excluded.value}: {candidate.detail}")
            table.add_row("", candidate.backend, candidate.pool, *cells, style="dim")
            continue
        scores = [f"{candidate.scores[name]:.2f}" for name in shown.values()]
        style = "green" if position == 1 else None
        table.add_row(
            str(position), candidate.backend, candidate.pool, f"{candidate.score:.2f}", *scores, style=style
        )
    console.print(table)
    if explanation.is_served:
        first = decision.ranked[0]
        console.print(f"goes to [bold green]{first.backend}[/] (pool {first.pool})")
    else:
        console.print("[bold red]nowhere[/]: no backend of its class can take it")
