"""Connections whose server dies or makes way for another, or whose process stands still."""

import asyncio
import shutil
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import anyio.lowlevel
import pytest
from redis.asyncio import SSLConnection
from redis.exceptions import RedisError
from support.certificates import self_signed
from support.kernel import vanish
from support.redis_server import failover, legs, own_server

from gateway.core.errors import ConfigError
from gateway.core.load import Load
from gateway.store.connections import LOOKS, Connections, StoreAway, patience
from gateway.store.redis import RedisLedger
from gateway.store.wire import subscribed
from gateway.tcp import SILENT_S

COMMAND_S = 0.2


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_what_is_sent_on_a_connection_that_has_just_been_reset_finds_the_store_away(
    tmp_path: Path,
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        connections = Connections(server.url, name="test", command_s=10.0, connections_max=1)
        async with subscribed(connections, "one") as subscription:
            server.stall()
            subscription.follow(["two"])
            server.kill()  # with something unread: the connection is reset
            subscription.follow(["three"])
            with pytest.raises(StoreAway), anyio.fail_after(20):
                await subscription.heard()
            subscription.follow(["four"])
        await connections.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_a_channel_whose_server_vanishes_is_lost() -> None:
    """The kernel ends it with a timeout, which is not one of the read."""

    served: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(writer)
        while data := await reader.read(65536):
            said = b"*3\r\n$9\r\nsubscribe\r\n$3\r\none\r\n:1\r\n"
            writer.write(said if b"SUBSCRIBE" in data else b"+OK\r\n" * data.count(b"*"))
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(f"redis://127.0.0.1:{port}", name="test", command_s=10.0, connections_max=1)
        async with subscribed(connections, "one") as subscription:
            own = cast("Any", subscription)._writer.get_extra_info("socket")
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == SILENT_S
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
            vanish(own)
            subscription.follow(["two"])  # never acknowledged
            with pytest.raises(StoreAway), anyio.fail_after(20):
                await subscription.heard()
        await connections.aclose()
        server.close()
        served[0].transport.abort()
        for _ in range(10):  # the loop closes it
            await anyio.lowlevel.checkpoint()

    anyio.run(main)


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_process_that_stood_still_does_not_take_its_server_for_away(
    tmp_path: Path, use_uvloop: bool
) -> None:
    async def main(url: str) -> None:
        ledger = RedisLedger(url, command_s=COMMAND_S)
        await ledger.sync()
        for rounds in range(2, 11):  # of the event loop: so that every step of a command is met by it
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ledger.sync)  # raises StoreAway
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
                stand_still(2 * COMMAND_S)
        await ledger.aclose()

    with own_server("valkey-9", tmp_path) as server:
        anyio.run(main, server.url, backend_options={"use_uvloop": use_uvloop})


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_process_that_stands_still_again_and_again_reaches_its_server_all_the_same(
    tmp_path: Path, use_uvloop: bool
) -> None:
    async def main(url: str) -> None:
        ledger = RedisLedger(url, command_s=COMMAND_S / 4)
        async with anyio.create_task_group() as tasks:

            async def meet() -> None:
                await ledger.acquire("a", Load(seqs=1), Load(seqs=4))  # connects; these raise StoreAway
                await ledger.sync()  # on connections of another kind
                tasks.cancel_scope.cancel()

            tasks.start_soon(meet)
            while True:
                stand_still(COMMAND_S / 8)
                await anyio.lowlevel.checkpoint()
        await ledger.aclose()

    with own_server("valkey-9", tmp_path) as server:
        anyio.run(main, server.url, backend_options={"use_uvloop": use_uvloop})


async def test_a_process_that_always_stands_still_has_more_patience_but_gives_up_in_the_end() -> None:
    async def go_on_standing_still() -> None:
        stand_still(0.003)  # the parts are of 1 ms
        await anyio.lowlevel.checkpoint()

    async with patience(0.01):
        for _ in range(2 * LOOKS):
            await go_on_standing_still()
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            for _ in range(10 * LOOKS):
                await go_on_standing_still()


async def test_a_burst_of_commands_waits_for_as_long_as_the_server_replies(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path) as server:
        connections = Connections(server.url, name="test", command_s=1.0, connections_max=1)

        async def far() -> Any:
            await anyio.sleep(0.3)  # as long as a distant server takes
            return await connections.redis.ping()

        assert all(await asyncio.gather(*(connections.bounded(far) for _ in range(6))))
        await connections.aclose()


async def test_a_burst_of_commands_does_not_wait_for_a_server_that_has_ceased_to_reply(
    tmp_path: Path,
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        connections = Connections(server.url, name="test", command_s=COMMAND_S, connections_max=1)
        await connections.bounded(connections.redis.ping)
        server.stall()
        found = await asyncio.gather(
            *(connections.bounded(connections.redis.ping) for _ in range(50)), return_exceptions=True
        )
        assert all(isinstance(error, StoreAway) for error in found)
        server.kill()
        await connections.aclose()


@pytest.mark.parametrize(("is_there", "asked"), [(False, 1), (True, 10)])
async def test_who_waits_behind_a_command_is_not_carried_out_if_that_finds_nobody_and_is_if_it_is_refused(
    tmp_path: Path, is_there: bool, asked: int
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        if not is_there:
            server.kill()
        connections = Connections(server.url, name="test", command_s=10.0, connections_max=1)
        asking = 0

        async def ask() -> Any:
            nonlocal asking
            asking += 1
            await anyio.lowlevel.checkpoint()  # the others come meanwhile
            return await connections.redis.execute_command("NO-SUCH-COMMAND")  # type: ignore[no-untyped-call]

        found = await asyncio.gather(*(connections.bounded(ask) for _ in range(10)), return_exceptions=True)
        assert [isinstance(error, StoreAway) and error.is_refusal for error in found] == 10 * [is_there]
        assert asking == asked
        await connections.aclose()


async def test_a_command_runs_to_its_end_though_its_caller_leaves(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path) as server:
        connections = Connections(server.url, name="test", command_s=10.0, connections_max=1)
        begun, may_go_on, replies = anyio.Event(), anyio.Event(), list[Any]()

        async def slow() -> None:
            begun.set()
            await may_go_on.wait()
            replies.append(await connections.redis.ping())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connections.bounded, slow)
            await begun.wait()
            tasks.cancel_scope.cancel()
            may_go_on.set()

        assert replies == [True]
        await connections.aclose()


def stand_still(seconds: float) -> None:
    """Keep the event loop from everything, as a process does that is given no processor."""
    time.sleep(seconds)


@pytest.mark.parametrize("leg", legs(own=True))
async def test_a_server_that_has_become_a_replica_is_left_for_the_one_in_its_place(
    leg: str, tmp_path: Path
) -> None:
    with failover(leg, tmp_path) as servers:
        connections = Connections(servers.url, name="test", command_s=10.0, connections_max=4)

        async def write() -> Any:
            return await connections.bounded(
                lambda: connections.redis.eval("return redis.call('INCR', KEYS[1])", 1, "k")
            )

        assert sorted(await asyncio.gather(*(write() for _ in range(4)))) == [1, 2, 3, 4]
        await servers.demote()
        servers.take_over()

        with pytest.raises(StoreAway, match=r"READONLY|read only replica"):
            await write()
        assert sorted(await asyncio.gather(*(write() for _ in range(4)))) == [1, 2, 3, 4]
        await connections.aclose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:1/0?no_such_option=1", "there is no option `no_such_option`$"),
        ("redis://127.0.0.1:1/0?db=first", "an option in it is not understood: "),
        ("rediss://127.0.0.1:1/0?ssl_cert_reqs=perhaps", "an option in it is not understood: "),
    ],
)
async def test_an_option_that_there_is_not_is_said_before_anything_is_sent(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^store\.url: {says}"):
        Connections(url, name="test", command_s=1.0, connections_max=1)


async def test_no_connection_looks_up_which_redis_py_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 1 ms each time, and a gateway opens dozens."""
    looked_up: list[str] = []
    monkeypatch.setattr("importlib.metadata.version", looked_up.append)
    connections = Connections("redis://127.0.0.1:1", name="test", command_s=1.0, connections_max=1)
    connections.connection()
    assert looked_up == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_url_may_name_another_driver() -> None:
    url = "redis://127.0.0.1:1?lib_name=another"
    told = vars(Connections(url, name="test", command_s=1.0, connections_max=1).connection())
    assert (told["driver_info"].name if "driver_info" in told else told["lib_name"]) == "another"


async def test_connections_share_what_was_read_of_certificates_until_a_file_changes(tmp_path: Path) -> None:
    """To read the system's takes 20 to 70 ms, and redis-py reads them even if the URL names others."""

    async def read(connections: Connections) -> object:
        connection = cast("SSLConnection", connections.connection())
        with pytest.raises(RedisError):  # nobody listens
            await connection.connect()  # type: ignore[no-untyped-call]
        return connection.ssl_context.context

    self_signed(tmp_path, "localhost")
    url = f"rediss://127.0.0.1:1?ssl_ca_certs={tmp_path}/cert.pem"
    jobs, files = [Connections(url, name="test", command_s=1.0, connections_max=2) for _ in range(2)]
    system = Connections("rediss://127.0.0.1:1", name="test", command_s=1.0, connections_max=1)
    lax = Connections(f"{url}&ssl_cert_reqs=none", name="test", command_s=1.0, connections_max=1)
    first = await read(jobs)
    assert first is await read(jobs) is await read(files) is not None
    assert len({None, first, await read(lax), await read(system)}) == 4

    self_signed(tmp_path, "localhost")
    renewed = await read(jobs)
    assert renewed not in (None, first)
    assert renewed is await read(files)


async def test_renewed_certificates_are_read_with_the_next_connection_and_not_before(tmp_path: Path) -> None:
    """The CA's file stands for all of them: at first it holds that of another server."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_unix_connection(urlsplit(server.url).path)
        await asyncio.gather(piped(reader, plain_writer), piped(plain_reader, writer))

    async def piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    folders = [tmp_path / name for name in ("own", "other", "valkey")]
    for folder in folders:
        folder.mkdir()
    (cert, key), (other, _) = self_signed(folders[0], "localhost"), self_signed(folders[1], "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    trusted = shutil.copy(other, tmp_path / "ca.pem")
    with own_server("valkey-9", folders[2]) as server:
        async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as front:
            url = f"rediss://localhost:{front.sockets[0].getsockname()[1]}?ssl_ca_certs={trusted}"
            connections = Connections(url, name="test", command_s=10.0, connections_max=1)
            with pytest.raises(StoreAway, match="CERTIFICATE_VERIFY_FAILED"):
                await connections.bounded(connections.redis.ping)
            shutil.copy(cert, trusted)
            assert await connections.bounded(connections.redis.ping)
            shutil.copy(key, trusted)  # no certificate: a renewal is half way, but what is open needs none
            assert await connections.bounded(connections.redis.ping)
            await connections.aclose()
