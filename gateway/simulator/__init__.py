"""A simulated Gemma 4 server: vLLM's wire, and the latency of a real deployment, without a GPU.

    async with running(SimulatorOptions(profile=load("h100-tp1-light"), speed=10)) as url: ...

`serve` runs one until a signal, `running` for the length of a block; `simulator` yields the server
itself, for orders (`order(FaultOrder(Fault.CRASH))`) and gauges (`host.engine`).
"""

from typing import TYPE_CHECKING, Any

from gateway.simulator.options import Fault, FaultOrder, Quirk, SimulatorOptions

if TYPE_CHECKING:
    from gateway.simulator.server import Simulator, running, serve, simulator


def __getattr__(name: str) -> Any:
    """Return what the server module offers, loaded at first use: `--help` needs the options alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gateway.simulator import server

    return getattr(server, name)


__all__ = [
    "Fault",
    "FaultOrder",
    "Quirk",
    "Simulator",
    "SimulatorOptions",
    "running",
    "serve",
    "simulator",
]
