"""Commands that ask another process over HTTP: whom they trust, and what they say of a foreign answer."""

import json
import ssl
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import anyio.to_thread
import httpx
import pytest
from click.testing import CliRunner
from support.certificates import self_signed
from support.raw_server import always, raw_server

from gateway.cli import main


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"lanes": {}, "jobs": [], "drained": null}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve https with a certificate that is not in the system's store."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    cert, key = self_signed(tmp_path, "localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("command", ["healthcheck", "jobs"])
@pytest.mark.parametrize("is_trusted", [True, False], ids=["trusted", "not-trusted"])
def test_the_systems_certificates_count(
    admin: str, command: str, is_trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(next(tmp_path.glob("*cert*"))))
    arguments = ["healthcheck", admin] if command == "healthcheck" else ["jobs", "list", "--admin", admin]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == (0 if is_trusted else 1), result.output
    assert ("self-signed certificate" in result.output) is not is_trusted


def test_a_proxy_in_the_environment_is_not_asked(admin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    from gateway import command_http

    with pytest.raises(httpx.ConnectError, match="certificate"):  # it was connected to, and not trusted
        command_http.request("GET", admin, timeout_s=5.0)


@pytest.mark.parametrize(
    "arguments", [["healthcheck", "URL"], ["jobs", "list", "--admin", "URL"]], ids="-".join
)
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".b"], ids=["empty-label", "long-label"])
def test_a_host_that_cannot_be_a_name_is_an_error_of_one_line(arguments: list[str], host: str) -> None:
    url = f"http://{host}:9090"
    result = CliRunner().invoke(main, [url if word == "URL" else word for word in arguments])
    assert (result.exit_code, result.exc_info and result.exc_info[0]) == (1, SystemExit)
    assert url in result.output
    assert result.output.count("\n") == 1


async def test_a_job_is_shown_by_a_gateway_of_the_previous_version() -> None:
    age = {"created_at": 1795362639.0, "age_s": 5.0, "started_at": None, "ended_at": None, "total_s": 5.0}
    place = {"lane": "m/light", "priority": "normal", "position": 3, "rests_s": None, "running_s": None}
    tried = {"attempts": 1, "failures": 1, "chunks": 0, "bytes": 17, "error": None}
    unset = {"key": None, "batch": None, "worker": None, "expires_in_s": None}
    body = json.dumps({"id": "resp_a", "status": "queued", **age, **place, **tried, **unset})
    page = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
    async with raw_server(always(page.encode())) as other:
        run = partial(CliRunner().invoke, main, ["jobs", "show", "resp_a", "--admin", other.url])
        result = await anyio.to_thread.run_sync(run)
    assert result.exit_code == 0, result.exc_info
    assert "queued, place 3 in its lane" in result.output


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("explain - --live", "/admin/explain: not the answer of a gateway (status 200)"),
        *(
            (f"jobs {command} --admin", " is not the admin port of a gateway (status 200)")
            for command in ("list", "list --json", "show one", "cancel one", "retry one", "drain")
        ),
    ],
)
@pytest.mark.parametrize("body", ['{"status": "ok"}', '{"refused": 1, "id": 1}', "[]", "null"])
async def test_json_of_another_server_is_an_error_of_one_line(command: str, says: str, body: str) -> None:
    page = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
    async with raw_server(always(page.encode())) as other:
        run = partial(CliRunner().invoke, main, [*command.split(), other.url], input="{}")
        result = await anyio.to_thread.run_sync(run)
    assert (result.exit_code, result.output) == (1, f"{other.url}{says}\n")
