"""A child process of the demo: `python -m gateway.demo.child fleet|gateway`.

It loads what it needs at once, then waits for its order, one line on standard input: so the slow part of
every start runs at the same time. When standard input ends, its parent is gone, however that died, and
so it ends too.
"""

import json
import os
import runpy
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any


def main() -> None:
    """Run the role named on the command line."""
    role = sys.argv[1]
    run = {"fleet": _fleet, "gateway": _gateway}[role]()
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    threading.Thread(target=_end_with_parent, args=(order.get("folder"),), daemon=True).start()
    run(order)


def _end_with_parent(folder: str | None) -> None:
    """End when the parent does; it would have removed `folder`."""
    sys.stdin.read()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _fleet() -> Callable[[Mapping[str, Any]], None]:
    """Prepare to run the simulated servers; their URLs are printed as a line of JSON once all are up."""
    import anyio

    from gateway.demo import fleet

    def run(order: Mapping[str, Any]) -> None:
        anyio.run(fleet.run, order["profiles"], order["boxes"], order["speed"], _announce)

    return run


def _announce(urls: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps(urls) + "\n")
    sys.stdout.flush()


def _gateway() -> Callable[[Mapping[str, Any]], None]:
    """Prepare to run `gemma-gateway serve`, the same that everybody runs."""
    import gateway.app
    import gateway.settings  # noqa: F401 - both are loaded while the fleet starts

    def run(order: Mapping[str, Any]) -> None:
        config = order["config"]
        # What the environment says of workers is about other gateways: the demo asks one for every decision.
        sys.argv = ["gemma-gateway", "serve", "--config", config, "--log-level", "warning", "--workers", "1"]
        runpy.run_module("gateway", run_name="__main__")

    return run


if __name__ == "__main__":
    main()
