"""Host names for which nobody answers, and hosts of several addresses of which some are gone."""

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gateway import names

WITHIN_S = 20.0


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_factory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes the event loop of a process, with uvloop installed and without."""
    if request.param == "asyncio":
        monkeypatch.setattr(names, "find_spec", lambda _: None)
    return names.loop_factory()


class Resolver:
    """Stands where the system's resolver does.

    Attributes:
        known: Per name, where it leads.
        asked: How often each name was asked for.
        over: Until it is set, nobody answers for any other name.
    """

    def __init__(self) -> None:
        self.known: dict[str, list[tuple[str, int]]] = {}
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, family: int = 0, *more: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not name.endswith(".test"):
            return self._real(host, port, family, *more, **named)
        self.asked[name] += 1
        if name not in self.known:
            self.over.wait(WITHIN_S)
            raise socket.gaierror(socket.EAI_AGAIN, "nobody answers")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in self.known[name]]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.over.set()


@pytest.fixture
def hosts() -> Iterator[ExitStack]:
    """What is opened here is closed with the test."""
    with ExitStack() as opened:
        yield opened


def listening(hosts: ExitStack) -> socket.socket:
    return hosts.enter_context(socket.create_server(("127.0.0.1", 0)))


def silent(hosts: ExitStack) -> tuple[str, int]:
    """Return an address that answers no more than a host that is gone: its queue is full."""
    server = hosts.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    where: tuple[str, int] = server.getsockname()
    for _ in range(2):
        filling = hosts.enter_context(socket.socket())
        filling.setblocking(False)
        filling.connect_ex(where)
    return where


def refusing() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where: tuple[str, int] = server.getsockname()
    return where


def test_names_that_nobody_answers_for_hold_up_no_other(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], resolver: Resolver
) -> None:
    resolver.known["there.test"] = [("127.0.0.1", 80)]

    async def look_up() -> None:
        loop = asyncio.get_running_loop()
        given_up = [
            loop.create_task(loop.getaddrinfo(name, 80))
            for name in ("gone.test", "away.test", b"lost.test")
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        for one in given_up[::2]:
            one.cancel()
        assert (await loop.getaddrinfo("there.test", 80))[0][4] == ("127.0.0.1", 80)
        resolver.over.set()
        failed = await asyncio.gather(*given_up[1::2], return_exceptions=True)
        assert {type(error) for error in failed} == {socket.gaierror}

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(look_up(), WITHIN_S))
    assert resolver.asked == {"gone.test": 1, "away.test": 1, "lost.test": 1, "there.test": 1}


def test_a_name_that_nobody_answers_for_does_not_delay_the_end(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], resolver: Resolver
) -> None:
    async def leave() -> None:
        loop = asyncio.get_running_loop()
        asking = loop.create_task(loop.getaddrinfo("gone.test", 80))
        await asyncio.sleep(0)
        asking.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(leave())
    assert not resolver.over.is_set()
    assert all(thread.daemon for thread in threading.enumerate() if "gone.test" in thread.name)


@pytest.mark.parametrize("first", ["silent", "refusing"])
def test_the_next_address_is_tried_where_the_first_takes_no_connection(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], resolver: Resolver, hosts: ExitStack, first: str
) -> None:
    server = listening(hosts)
    gone = silent(hosts) if first == "silent" else refusing()
    resolver.known["engine.test"] = [gone, server.getsockname()]

    async def connect() -> Any:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "engine.test", 80)
        where = transport.get_extra_info("peername")
        transport.close()
        return where

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(asyncio.wait_for(connect(), WITHIN_S)) == server.getsockname()


@pytest.mark.parametrize("is_reachable_only_once", [False, True])
def test_a_host_none_of_whose_addresses_takes_a_connection_refuses_it(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], resolver: Resolver, is_reachable_only_once: bool
) -> None:
    resolver.known["engine.test"] = addresses = [refusing(), refusing()]
    if is_reachable_only_once:
        addresses[1] = ("255.255.255.255", 80)

    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, "engine.test", 80)

    with asyncio.Runner(loop_factory=loop_factory) as runner, pytest.raises(ConnectionRefusedError):
        runner.run(asyncio.wait_for(connect(), WITHIN_S))


def test_a_server_behind_tls_is_asked_for_by_its_name(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], resolver: Resolver, hosts: ExitStack
) -> None:
    server = listening(hosts)
    resolver.known["engine.test"] = [server.getsockname()]
    heard: list[bytes] = []

    def hear() -> None:
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(4096))

    hearing = threading.Thread(target=hear)
    hearing.start()

    async def connect() -> None:
        await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, "engine.test", 80, ssl=ssl.create_default_context()
        )

    with asyncio.Runner(loop_factory=loop_factory) as runner, pytest.raises(OSError):
        runner.run(asyncio.wait_for(connect(), WITHIN_S))
    hearing.join(WITHIN_S)
    assert b"engine.test" in heard[0]
