"""A simulated box: several models, each with its own port, and memory for one of them.

    async with simulated_box(BoxOptions(spark_pair(speed=50))) as spark: ...

A model holds the memory from the order to start it until its process has ended, except while it sleeps in
sleep mode. If a model needs the memory while another holds it, both are killed, as by the kernel's OOM
killer. The box's counters are never reset.
"""

import contextlib
import random
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup, TaskStatus
from uvicorn.server import ServerState

from gateway.clock import SystemClock
from gateway.simulator.box_control import Control
from gateway.simulator.box_model import HOLDING, Busy, Model, Residency, State, Swap, Violation
from gateway.simulator.box_options import Boot, BoxOptions
from gateway.simulator.door import Door, cut_connections, wire
from gateway.simulator.options import Fault, FaultOrder, SimulatorOptions
from gateway.simulator.server import Memory, Simulator, behind
from gateway.tasks import TasksBeside

_REMEMBERED = 1000
"""Maximum number of swaps, residencies and violations kept, each. A choice."""


class Box:
    """Several models that share one memory.

    Attributes:
        violations: How often a model needed the memory while another held it.
        swaps, residencies, violation_log: The latest of each, oldest first.
    """

    def __init__(self, options: BoxOptions, models: dict[str, Model], door: Door, tasks: TaskGroup) -> None:
        self.options = options
        self.models = models
        self.violations = 0
        self.swaps: deque[Swap] = deque(maxlen=_REMEMBERED)
        self.residencies: deque[Residency] = deque(maxlen=_REMEMBERED)
        self.violation_log: deque[Violation] = deque(maxlen=_REMEMBERED)
        self._door = door
        self._state = ServerState()
        self._tasks = tasks
        self._clock = SystemClock()
        self._dice = {name: random.Random(f"{options.seed} {name}") for name in models}
        self._left: tuple[str, float] | None = None  # the model that answered last, and until when
        for model in models.values():
            model.since_s = self._clock.wall()

    @property
    def url(self) -> str:
        """Base URL of its control port."""
        return self._door.url

    @property
    def cut(self) -> int:
        """Number of requests cut off because their model was stopped, put to sleep, killed, or died."""
        return sum(model.cut for model in self.models.values())

    # -------------------------------------------------------------- orders

    def start(self, name: str) -> None:
        """Start a model, which boots in the background. A loaded or booting model is left as it is.

        Raises:
            KeyError: there is no such model.
            Busy: it is being stopped.
        """
        model = self.models[name]
        if model.state is State.STOPPING:
            raise Busy(f"{name} is being stopped")
        if model.state in HOLDING or model.state is State.SLEEPING:
            return
        model.starts += 1
        if not self.is_refused(model, "start"):
            self.to(model, State.BOOTING)
            model.scope = anyio.CancelScope()
            self._tasks.start_soon(self._boot, model, self._next_boot(model), model.scope)

    def stop(self, name: str) -> None:
        """Stop a model, as by SIGTERM: its requests are cut off.

        Raises:
            KeyError: there is no such model.
        """
        model = self.models[name]
        if model.state in (State.STOPPED, State.FAILED):
            self.to(model, State.STOPPED)
        elif model.state is not State.STOPPING:
            self.to(model, State.STOPPING)
            self._tasks.start_soon(self._end, model, model.scope)

    def kill(self, name: str) -> None:
        """Kill a model, as by SIGKILL: connections are reset, and its memory is freed.

        Raises:
            KeyError: there is no such model.
        """
        model = self.models[name]
        if model.state not in (State.STOPPED, State.FAILED):
            self._kill(model, "killed by an order")

    # -------------------------------------------------------------- inside

    async def open(self) -> None:
        """Start the resident model and those asleep beside it, then accept orders."""
        for name, model in self.models.items():
            if name == self.options.resident:
                await self._tasks.start(self._load, model, State.RUNNING)
            elif self.options.resident is not None and model.options.sleep_mode:
                await self._tasks.start(self._load, model, State.SLEEPING)
        self._door.open(wire(Control(self)), self._state)

    async def close(self) -> None:
        """Stop accepting orders."""
        self._door.close()
        await cut_connections(self._state)

    async def shut_down(self) -> None:
        """Stop all models, as by SIGTERM."""
        async with anyio.create_task_group() as tasks:
            for model in self.models.values():
                if model.server is not None:
                    tasks.start_soon(model.server.stop)

    def _next_boot(self, model: Model) -> Boot:
        if model.boots:
            return model.boots.popleft()
        fails = self._dice[model.name].random() < self.options.fail_chance
        return Boot.FAIL if fails else Boot.OK

    async def _boot(self, model: Model, boot: Boot, scope: anyio.CancelScope) -> None:
        """Run a model's process from its start to its end."""
        options = model.options
        if boot not in (Boot.OK, Boot.FAIL):
            options = replace(options, fault=FaultOrder(Fault(boot)))
        with scope:
            async with self._process(model, options) as server:
                if boot is Boot.FAIL:
                    await anyio.sleep(server.boot_s / options.speed)
                    model.failed_boots += 1
                    self.to(model, State.FAILED, "the boot failed")
                    return
                await server.boot()
                if model.state is State.BOOTING:  # unless it was told to stop at that moment
                    self.to(model, State.RUNNING)
                await anyio.sleep_forever()

    async def _load(self, model: Model, state: State, *, task_status: TaskStatus[None]) -> None:
        """Run the process of a model that is loaded when the box starts."""
        with model.scope:
            async with self._process(model, model.options) as server:
                if state is State.SLEEPING:
                    server.doze(1)
                await server.boot(0)
                self.to(model, state)
                task_status.started()
                await anyio.sleep_forever()

    @contextlib.asynccontextmanager
    async def _process(self, model: Model, options: SimulatorOptions) -> AsyncIterator[Simulator]:
        """Run a model's server, once the previous one has ended."""
        async with model.alive:
            try:
                async with behind(model.door, options, _Share(self, model)) as model.server:
                    yield model.server
            finally:
                model.gone()

    async def _end(self, model: Model, scope: anyio.CancelScope) -> None:
        """Stop a model. First its port refuses connections; the memory is free once the process has ended."""
        if model.server is not None:
            await model.server.stop()
        scope.cancel()
        await anyio.sleep(self.options.stop_s / model.options.speed)
        if model.scope is scope and model.state is State.STOPPING:  # it may have been killed in the meantime
            self.to(model, State.STOPPED)

    def is_refused(self, model: Model, by: str) -> bool:
        """Return whether other models hold the memory that a model needs; if so, kill it and them."""
        holders = [other for other in self.models.values() if other is not model and other.state in HOLDING]
        if not holders:
            return False
        self.violations += 1
        held_by = tuple(holder.name for holder in holders)
        self.violation_log.append(Violation(model.name, held_by, self._clock.wall(), by))
        reason = f"out of memory: {model.name} needed it while {' and '.join(held_by)} held it"
        for killed in (*holders, model):
            self._kill(killed, reason)
        return True

    def _kill(self, model: Model, reason: str) -> None:
        model.kills += 1
        if model.server is not None:
            model.server.halt()
        model.scope.cancel()
        self.to(model, State.FAILED, reason)

    def to(self, model: Model, state: State, reason: str = "") -> None:
        """Record a model's new state."""
        if state is not model.state:
            model.since_s = self._clock.wall()
            if model.state is State.RUNNING:
                self._leave(model)
            if state is State.RUNNING:
                self._come(model)
        model.state, model.reason = state, reason
        model.changed.set()
        model.changed = anyio.Event()

    def _come(self, model: Model) -> None:
        model.begin()
        now_s = self._clock.wall()
        if self._left is not None and self._left[0] != model.name:
            left, until = self._left
            took_s = (anyio.current_time() - until) * model.options.speed
            self.swaps.append(Swap(left, model.name, now_s, took_s))
        self.residencies.append(Residency(model.name, now_s))

    def _leave(self, model: Model) -> None:
        now_s, answered_s = self._clock.wall(), model.end()
        for residency in self.residencies:
            if residency.model == model.name and residency.until_s is None:
                residency.until_s, residency.engine_s = now_s, answered_s
        self._left = (model.name, anyio.current_time())


class _Share(Memory):
    """A model's share of the box's memory."""

    def __init__(self, box: Box, model: Model) -> None:
        self._box = box
        self._model = model

    def asleep(self) -> None:
        """See `server.Memory`."""
        if self._model.state is State.RUNNING:
            self._box.to(self._model, State.SLEEPING)

    def waking(self) -> None:
        """See `server.Memory`."""
        if not self._box.is_refused(self._model, "wake_up"):
            self._box.to(self._model, State.WAKING)

    def awake(self) -> None:
        """See `server.Memory`."""
        if self._model.state is State.WAKING:
            self._box.to(self._model, State.RUNNING)


@contextlib.asynccontextmanager
async def simulated_box(options: BoxOptions) -> AsyncIterator[Box]:
    """Run a simulated box in this event loop for the duration of the block; yield it.

    Ports are bound from the beginning, and refuse connections while their model does not run.

    Raises:
        OSError: a port is in use.
    """
    with contextlib.ExitStack() as doors:
        door = _held(doors, options.host, options.port)
        models = {}
        for name, given in options.models.items():
            own = _held(doors, given.host, given.port)
            models[name] = Model(name, replace(given, port=own.port), own, options.boots.get(name, ()))
        async with TasksBeside(Exception) as tasks:
            running = Box(options, models, door, tasks)
            try:
                await running.open()
                yield running
            finally:
                with anyio.CancelScope(shield=True):
                    await running.close()


def _held(doors: contextlib.ExitStack, host: str, port: int) -> Door:
    door = Door(host, port)
    doors.callback(door.release)
    return door


async def serve_box(options: BoxOptions, *, ready: Callable[[Box], None]) -> None:
    """Run a simulated box until SIGTERM or SIGINT, or until cancelled; `ready` is called once it is up."""
    async with simulated_box(options) as running:
        ready(running)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                await running.shut_down()
                break
