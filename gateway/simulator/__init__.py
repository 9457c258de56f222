"""A simulated Gemma 4 server: vLLM's wire, and the latency of a real deployment, without a GPU.

    async with running(SimulatorOptions(profile=load("h100-tp1-light"), speed=10)) as url: ...

`serve` runs one until a signal, `running` for the length of a block; `simulator` yields the server
itself, for orders (`order(FaultOrder(Fault.CRASH))`) and gauges (`host.engine`).
"""

from gateway.simulator.options import Fault, FaultOrder, Quirk, SimulatorOptions
from gateway.simulator.server import Simulator, running, serve, simulator

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
