"""The control port of a simulated box: plain HTTP, as a plain ASGI application.

GET  /models              the state of all models
GET  /models/NAME         the state of one
POST /models/NAME/start   202 once the order is accepted; with ?wait=true, once it is carried out
POST /models/NAME/stop    the same
POST /models/NAME/kill    kill it at once, as by SIGKILL
POST /models/NAME/boots   {"boots": ["fail", "ok"]}: the outcome of its next boots
GET  /box                 the box's counters
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import anyio

from gateway.simulator import refusals
from gateway.simulator.box_model import Busy, Model, State
from gateway.simulator.box_options import Boot
from gateway.simulator.exchange import ClientDisconnected, Exchange, Receive, Scope, Send, as_bytes
from gateway.simulator.reading import read_json
from gateway.simulator.refusals import Refusal

if TYPE_CHECKING:
    from gateway.simulator.box import Box

_DONE = {
    "start": (State.RUNNING, State.SLEEPING),
    "stop": (State.STOPPED,),
    "kill": (State.STOPPED, State.FAILED),
}


class Control:
    """The ASGI application."""

    def __init__(self, box: "Box") -> None:
        self._box = box

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        exchange = Exchange(scope, receive, send, scope["state"]["connection"])
        try:
            status, body = await self._answer(exchange, scope["method"], scope["path"])
        except ClientDisconnected:
            return
        except Refusal as refusal:
            await exchange.reply(refusal.status, refusal.body, vary=False)
            return
        await exchange.reply(status, as_bytes(body), vary=False)

    async def _answer(self, exchange: Exchange, method: str, path: str) -> tuple[int, object]:
        match (method, *path.strip("/").split("/")):
            case ("GET", "models"):
                return 200, {"models": [_described(model) for model in self._box.models.values()]}
            case ("GET", "models", name):
                return 200, _described(self._model(name))
            case ("GET", "box"):
                return 200, _counted(self._box)
            case ("POST", "models", name, ("start" | "stop" | "kill") as order):
                return await self._switch(exchange, self._model(name), order)
            case ("POST", "models", name, "boots"):
                return await self._plan(exchange, self._model(name))
            case _:
                raise refusals.detail(404, f"there is no {method} {path}")

    def _model(self, name: str) -> Model:
        try:
            return self._box.models[name]
        except KeyError:
            known = ", ".join(self._box.models)
            raise refusals.detail(404, f"there is no model {name!r}; there are {known}") from None

    async def _switch(self, exchange: Exchange, model: Model, order: str) -> tuple[int, object]:
        await exchange.body()  # it is empty, but a client that sends one must be able to
        try:
            {"start": self._box.start, "stop": self._box.stop, "kill": self._box.kill}[order](model.name)
        except Busy as busy:
            raise refusals.detail(409, str(busy)) from busy
        if exchange.query().get("wait", "false").lower() in ("true", "1"):
            with anyio.CancelScope() as waiting:
                exchange.connection.on_lost = waiting.cancel
                await model.settled()
            if waiting.cancelled_caught:
                raise ClientDisconnected
        elif not model.is_settled:
            return 202, _described(model)
        return (200 if model.state in _DONE[order] else 500), _described(model)

    async def _plan(self, exchange: Exchange, model: Model) -> tuple[int, object]:
        boots = read_json(await exchange.body()).get("boots")
        if not isinstance(boots, list) or not all(boot in tuple(Boot) for boot in boots):
            raise refusals.detail(400, f"boots is a list of {', '.join(Boot)}")
        model.boots.clear()
        model.boots.extend(Boot(boot) for boot in boots)
        return 200, _described(model)


def _described(model: Model) -> Mapping[str, object]:
    server = model.server
    # A model that crashed, or was restarted, through its own port boots again by itself.
    is_back = server is None or server.booted.is_set()
    return {
        "name": model.name,
        "state": model.state if is_back or model.state is not State.RUNNING else State.BOOTING,
        "since_s": model.since_s,
        "reason": model.reason,
        "url": model.url,
        "served_model": model.options.model,
        "profile": model.options.profile.name,
        "starts": model.starts,
        "failed_boots": model.failed_boots,
        "kills": model.kills,
        "requests": server.load if server is not None else 0,
        "cut_requests": model.cut,
        "resident_s": model.resident_s,
        "next_boots": list(model.boots),
    }


def _counted(box: "Box") -> Mapping[str, object]:
    return {
        "violations": box.violations,
        "cut_requests": box.cut,
        "violation_log": [asdict(violation) for violation in box.violation_log],
        "swaps": [asdict(swap) for swap in box.swaps],
        "residencies": [asdict(residency) for residency in box.residencies],
    }
