"""A simulated Gemma 4 server: vLLM's wire, and the latency of a real deployment, without a GPU.

    async with running(SimulatorOptions(profile=load("h100-tp1-light"), speed=10)) as url: ...

`serve` runs one until a signal, `running` for the length of a block; `simulator` yields the server
itself, for orders (`order(FaultOrder(Fault.CRASH))`) and gauges (`host.engine`). `simulated_box` yields
a box of models that share one memory, for orders (`start`, `stop`) and proof (`violations`, `cut`).
"""

from typing import TYPE_CHECKING, Any

from gateway.simulator.box_options import Boot, BoxOptions, spark_pair
from gateway.simulator.options import Fault, FaultOrder, Quirk, SimulatorOptions

if TYPE_CHECKING:
    from gateway.simulator.box import Box, serve_box, simulated_box
    from gateway.simulator.box_model import State
    from gateway.simulator.server import Simulator, running, serve, simulator


def __getattr__(name: str) -> Any:
    """Return what runs something, loaded at first use: `--help` needs the options alone."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gateway.simulator import box, box_model, server

    home = next(module for module in (server, box, box_model) if hasattr(module, name))
    return getattr(home, name)


__all__ = [
    "Boot",
    "Box",
    "BoxOptions",
    "Fault",
    "FaultOrder",
    "Quirk",
    "Simulator",
    "SimulatorOptions",
    "State",
    "running",
    "serve",
    "serve_box",
    "simulated_box",
    "simulator",
    "spark_pair",
]
