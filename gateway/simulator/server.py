"""The simulated server as a process would be: its port, its connections, its boot, its end.

uvicorn's HTTP protocol speaks to the clients; the sockets are handled here, because a server has to be
able to refuse connections, cut them, and come back, all on one port.
"""

import contextlib
import math
import signal
import socket
from asyncio import Server, get_running_loop
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate

import anyio
from anyio.abc import TaskGroup
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.clock import SystemClock
from gateway.simulator.app import Application
from gateway.simulator.faults import OF_THE_SERVER, Faults
from gateway.simulator.host import EngineHost
from gateway.simulator.options import Fault, FaultOrder, SimulatorOptions
from gateway.simulator.tally import Tally

KEEP_ALIVE_S = 5  # vLLM's: an idle connection is closed after it
_BOOT_S = 120.0  # where nobody published a boot time: a guess between the published 147 s and 60 s
_REFUSE_S = 5.0
_DYING_S = 0.5  # from the engine's death to the server's, about as measured (0.3 to 0.9 s)
_ENDING_S = 1.0  # real seconds that answers get to write their last bytes
_BACKLOG = 2048


class ClientConnection(HttpToolsProtocol):
    """One client's connection: uvicorn's, with a way past HTTP and an event for its end."""

    def __init__(self, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.on_lost: Callable[[], None] | None = None
        self._lost = anyio.Event()

    def on_message_begin(self) -> None:
        """Give each request its connection."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the answer under way that its client is gone."""
        super().connection_lost(exc)
        self._lost.set()
        if self.on_lost is not None:
            self.on_lost()

    @property
    def is_lost(self) -> bool:
        """See `app.Connection.is_lost`."""
        return self._lost.is_set()

    def write(self, data: bytes) -> None:
        """See `app.Connection.write`."""
        self.transport.write(data)

    async def close(self, *, abort: bool = False) -> None:
        """See `app.Connection.close`."""
        if abort:
            self.transport.abort()
        else:
            self.transport.close()
        await self._lost.wait()


class Door:
    """The server's port. Closed, it refuses connections, but nobody else can take it."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the port, closed.

        Raises:
            OSError: the port is taken.
        """
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A socket that is bound but does not listen holds the port: connecting to it is refused.
        self._holder = self._bound(host, port)
        self.host, self.port = self._holder.getsockname()[:2]
        self._server: Server | None = None

    def _bound(self, host: str, port: int) -> socket.socket:
        bound = socket.socket(self._family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError:
            bound.close()
            raise
        return bound

    @property
    def url(self) -> str:
        """The server's base URL."""
        host = f"[{self.host}]" if self._family == socket.AF_INET6 else self.host
        return f"http://{host}:{self.port}"

    async def open(self, connect: Callable[[], ClientConnection]) -> None:
        """Accept connections, each served by what `connect` returns."""
        if self._server is None:
            listener = self._bound(self.host, self.port)
            self._server = await get_running_loop().create_server(connect, sock=listener, backlog=_BACKLOG)

    def close(self) -> None:
        """Refuse connections; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def release(self) -> None:
        """Give the port back."""
        self.close()
        self._holder.close()


class Simulator:
    """One simulated server.

    Attributes:
        options: What it was told.
        faults: What requests meet.
        host: Its engine; another one after each restart.
        is_draining: It finishes what runs and refuses what comes.
        load: Requests inside the server.
        booted: Set once it accepts connections; replaced when it boots again.
    """

    def __init__(self, options: SimulatorOptions, tasks: TaskGroup, door: Door) -> None:
        """Take over a port; connections are refused until `boot`."""
        self.options = options
        self.faults = Faults()
        self.is_draining = False
        self.load = 0
        self.booted = anyio.Event()
        self._tasks = tasks
        self._clock = SystemClock()
        self._state = ServerState()
        self._config = Config(
            Application(self),
            http=ClientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._door = door
        self.host = self._new_host()
        self._lifted = anyio.Event()  # set when the order in force is replaced

    @property
    def url(self) -> str:
        """Its base URL, known before it has booted."""
        return self._door.url

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since it last booted."""
        return self.host.tally.generation_tokens

    async def boot(self, boot_s: float | None = None) -> None:
        """Start the engine, refuse connections for the boot time, then accept them."""
        seconds = self._boot_s() if boot_s is None else boot_s
        if seconds > 0:
            await anyio.sleep(seconds / self.options.speed)
        self._tasks.start_soon(self.host.run)
        await self._door.open(self._connection)
        self.booted.set()

    async def keep_date(self) -> None:
        """Refresh the date header every second, for ever."""
        while True:
            self._set_date()
            await anyio.sleep(1)

    def order(self, order: FaultOrder | None) -> None:
        """Carry out a fault in place of the one that is on; None only lifts that one."""
        self._lifted.set()
        self._lifted = anyio.Event()
        self.faults.set(order)
        if order is not None and order.fault in OF_THE_SERVER:
            self._tasks.start_soon(self._strike, order)

    async def stop(self) -> None:
        """End as on SIGTERM: drain for `shutdown_timeout_s`, cut off what is left, close the port."""
        if self.options.shutdown_timeout_s > 0:
            self.is_draining = True
            with anyio.move_on_after(self.options.shutdown_timeout_s / self.options.speed):
                while self.load:
                    await self._next_end()
        self._door.close()
        self._close_idle()
        for answer in self.host.answers:
            self.host.cut_off(answer)
        with anyio.move_on_after(_ENDING_S):
            while self.load:
                await self._next_end()
        await self.kill()

    async def kill(self) -> None:
        """End as on SIGKILL: every connection is cut."""
        self._door.release()
        self.host.stop()
        await self._cut_connections()

    # -------------------------------------------------------------- inside

    def _boot_s(self) -> float:
        if self.options.boot_s is not None:
            return self.options.boot_s
        return self.options.profile.boot_s if self.options.profile.boot_s is not None else _BOOT_S

    def _new_host(self) -> EngineHost:
        self._set_date()
        return EngineHost(self.options, Tally(self._clock.wall()))

    def _set_date(self) -> None:
        date = formatdate(self._clock.wall(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._config.encoded_headers]

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._config, self._state)

    async def _strike(self, order: FaultOrder) -> None:
        match order.fault:
            case Fault.HANG:
                host = self.host
                host.hang()
                await self._until_lifted(order, math.inf)
                host.resume()
            case Fault.REFUSE:
                self._door.close()
                self._close_idle()
                await self._until_lifted(order, _REFUSE_S)
                await self._door.open(self._connection)
            case Fault.CRASH:
                self.host.die()
                await anyio.sleep(_DYING_S / self.options.speed)
                await self._boot_again(order)
            case _:
                self._door.close()
                for answer in self.host.answers:
                    self.host.cut_off(answer)
                with anyio.move_on_after(_ENDING_S):
                    while self.load:
                        await self._next_end()
                await self._boot_again(order)

    async def _boot_again(self, order: FaultOrder) -> None:
        self.booted = anyio.Event()
        self._door.close()
        self.host.stop()
        await self._cut_connections()
        self.host = self._new_host()
        self._lift(order)
        await self.boot(order.for_s)

    async def _until_lifted(self, order: FaultOrder, default_s: float) -> None:
        """Wait until an order is lifted or its time is over."""
        seconds = default_s if order.for_s is None else order.for_s
        with anyio.move_on_after(seconds / self.options.speed):
            await self._lifted.wait()
        self._lift(order)

    def _lift(self, order: FaultOrder) -> None:
        """Note that an order has run its course, unless another one has replaced it."""
        if self.faults.order is order:
            self.faults.set(None)

    def _close_idle(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()

    async def _cut_connections(self) -> None:
        for connection in list(self._state.connections):
            connection.transport.abort()
        with anyio.move_on_after(_ENDING_S):
            while self._state.tasks:
                await self._next_end()

    async def _next_end(self) -> None:
        await anyio.sleep(0.002)


@contextlib.asynccontextmanager
async def simulator(options: SimulatorOptions) -> AsyncIterator[Simulator]:
    """Run a simulated server in this event loop for the length of the block; yield it.

    With `boot_s` 0 it accepts connections when the block begins; else its URL is known, it refuses, and
    `booted` is set when it is up. Leaving the block kills it.

    Raises:
        OSError: the port is taken.
    """
    door = Door(options.host, options.port)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        server = Simulator(options, tasks, door)
        try:
            tasks.start_soon(server.keep_date)
            if options.fault is not None:
                server.order(options.fault)
            if options.boot_s == 0:
                await server.boot()
            else:
                tasks.start_soon(server.boot)
            yield server
        except Exception as error:  # noqa: BLE001 - carried out by value: the group would wrap it
            failure = error
        finally:
            with anyio.CancelScope(shield=True):
                await server.kill()
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@contextlib.asynccontextmanager
async def running(options: SimulatorOptions) -> AsyncIterator[str]:
    """Run a simulated server as `simulator` does; yield its base URL."""
    async with simulator(options) as server:
        yield server.url


async def serve(options: SimulatorOptions, *, ready: Callable[[str], None] | None = None) -> None:
    """Run a simulated server until SIGTERM or SIGINT, or until cancelled.

    `ready` is called with the base URL once connections are accepted. The first signal stops it as
    vLLM stops (`shutdown_timeout_s`), a second one at once.
    """
    async with simulator(options) as server, anyio.create_task_group() as tasks:

        async def announce() -> None:
            await server.booted.wait()
            if ready is not None:
                ready(server.url)

        async def stop() -> None:
            await server.stop()
            tasks.cancel_scope.cancel()

        tasks.start_soon(announce)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            seen = 0
            async for _ in signals:
                seen += 1
                if seen > 1:
                    break
                tasks.start_soon(stop)
        tasks.cancel_scope.cancel()


__all__ = ["Simulator", "running", "serve", "simulator"]
