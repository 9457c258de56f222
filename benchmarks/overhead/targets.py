"""What is measured: the gateway as a site runs it, and others before the same engines."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.overhead import machine
from benchmarks.overhead.verdict import DIRECT, GATEWAY, NGINX

API_KEY = "sk-benchmark"
KEYS = 32
STARTS_IN_S = 60


class NotRunning(Exception):
    """A target did not start, or has ended."""


@dataclass(frozen=True)
class Surroundings:
    """Where a target finds things.

    Attributes:
        folder: Of this run, for its files.
        engines: Ports of the engines.
        vocabulary: Rank file for the gateway.
        workers: Processes of the gateway.
        clock: Where the gateway is to note what its token counts take (clocked.py); None: nowhere.
    """

    folder: Path
    engines: Sequence[int]
    vocabulary: Path
    workers: int = 1
    clock: Path | None = None

    @property
    def urls(self) -> list[str]:
        """Return where the engines are."""
        return [f"http://127.0.0.1:{port}" for port in self.engines]


@dataclass(frozen=True)
class Command:
    """How a target is started, to listen on `port`.

    Attributes:
        words: What is run.
        files: Name and text of what must lie in the folder before.
        environment: What it gets besides this process's own.
    """

    words: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Something that stands between callers and engines.

    Attributes:
        name: In the tables.
        version: As it says itself.
        command: How it is started, from surroundings and a port; None: callers ask the engine itself.
    """

    name: str
    version: str
    command: Callable[[Surroundings, int], Command] | None


# ------------------------------------------------------------------ the gateway


def gateway_document(around: Surroundings, port: int) -> dict[str, object]:
    """Return a configuration with everything on that a site has on, and limits that this load never meets."""
    names = [f"engine-{number}" for number in range(len(around.urls))]
    limits = {"knee_seqs": 999, "context_tokens": 1_048_576, "kv_blocks": None}
    gates = {"long_prefills": 1_000_000, "prefill_s": 1_000_000}
    keys = {f"caller-{number}": f"{API_KEY}-{number}" if number else API_KEY for number in range(KEYS)}
    return {
        "listen": f"127.0.0.1:{port}",
        "admin": "127.0.0.1:0",
        "tokenizer": {"vocab": str(around.vocabulary)},
        "backends": {
            name: {"url": url, "profile": "h100-tp1-light", "model": "gemma-4", "limits": limits}
            for name, url in zip(names, around.urls, strict=True)
        },
        "pools": {
            "light": {"backends": names[:-1], "gates": gates},
            "push": {"backends": names[-1:], "gates": gates},
        },
        "models": {
            "gemma-4": {
                "classes": [
                    {"class": "reasoning", "when": {"reasoning": True}, "pools": ["push"]},
                    {"class": "image", "when": {"images": True}, "pools": ["light", "push"]},
                    {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
                    {"class": "short_chat", "pools": ["light", "push"]},
                ]
            }
        },
        "keys": {name: {"sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in keys.items()},
        "telemetry": {"otlp": {"endpoint": around.urls[0]}, "traces": {"share": 0.01}},
    }


def _gateway(around: Surroundings, port: int) -> Command:
    module = ["gateway"] if around.clock is None else ["benchmarks.overhead.clocked", str(around.clock)]
    words = [sys.executable, "-m", *module, "serve", "-c", "gateway.yaml"]
    if around.workers > 1:
        words += ["--workers", str(around.workers)]
    return Command(words, {"gateway.yaml": yaml.safe_dump(gateway_document(around, port))})


# ------------------------------------------------------------------ beside it

_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr warn; {user}
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 10000000;
  client_max_body_size 64m; client_body_buffer_size 2m; client_body_temp_path {folder}/nginx-bodies;
  proxy_temp_path {folder}/nginx-proxied; fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi; scgi_temp_path {folder}/nginx-scgi;
  upstream engines {{ {servers} keepalive 2048; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""
"""One worker; connections to the engines are kept; every read is handed on at once."""


def _nginx(program: str) -> Callable[[Surroundings, int], Command]:
    def command(around: Surroundings, port: int) -> Command:
        text = _NGINX.format(
            folder=around.folder,
            port=port,
            user="user root;" if os.geteuid() == 0 else "",
            servers=" ".join(f"server 127.0.0.1:{engine};" for engine in around.engines),
        )
        words = [program, "-p", str(around.folder), "-e", "stderr", "-c", str(around.folder / "nginx.conf")]
        return Command(words, {"nginx.conf": text})

    return command


def _router(*words: str) -> Callable[[Surroundings, int], Command]:
    """Return how a Rust router is started; vLLM's and SGLang's share their options."""

    def command(around: Surroundings, port: int) -> Command:
        where = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *around.urls]
        quiet = ["--policy", "round_robin", "--log-level", "error"]
        return Command([*words, *where, *quiet, "--prometheus-port", str(machine.free_port())])

    return command


def _litellm(program: str) -> Callable[[Surroundings, int], Command]:
    def command(around: Surroundings, port: int) -> Command:
        models = [
            {
                "model_name": "gemma-4",
                "litellm_params": {
                    "model": "hosted_vllm/gemma-4",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                    "input_cost_per_token": 0.0,
                    "output_cost_per_token": 0.0,
                },
            }
            for url in around.urls
        ]
        words = [program, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
        return Command(
            [*words, "--num_workers", "1", "--telemetry", "False"],
            {"litellm.yaml": yaml.safe_dump({"model_list": models})},
            {
                "LITELLM_LOG": "ERROR",
                "LITELLM_MODE": "PRODUCTION",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
                "NO_DOCS": "True",
            },
        )

    return command


def _package_version(program: str, package: str) -> str:
    """Return the version of a package in the environment that a program belongs to."""
    python = Path(program).parent / "python"
    return machine.output_of(
        [str(python), "-c", f"import importlib.metadata as m; print(m.version('{package}'))"]
    ).splitlines()[-1]


def available(folders: Sequence[Path]) -> list[Target]:
    """Return what can be measured here: the engine itself, the gateway, and whatever else is installed.

    `folders` are looked through before PATH.
    """
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath), "/usr/sbin"])
    found = [Target(DIRECT, "", None)]
    if nginx := shutil.which("nginx", path=path):
        version = re.sub(r".*nginx/", "", machine.output_of([nginx, "-v"]))
        found.append(Target(NGINX, version, _nginx(nginx)))
    if program := shutil.which("vllm-router", path=path):
        found.append(Target("vllm-router", _package_version(program, "vllm-router"), _router(program)))
    if program := shutil.which("sglang-router", path=path):
        python = str(Path(program).parent / "python")
        launch = _router(python, "-m", "sglang_router.launch_router")
        found.append(Target("sglang-router", _package_version(program, "sglang-router"), launch))
    if program := shutil.which("litellm", path=path):
        found.append(Target("litellm", _package_version(program, "litellm"), _litellm(program)))
    from gateway import __version__

    found.append(Target(GATEWAY, __version__, _gateway))
    return found


# ------------------------------------------------------------------ running one


class Running:
    """A target that answers.

    Attributes:
        port: Where callers ask it.
        process: Its first process; None where callers ask the engine itself.
    """

    def __init__(self, port: int, process: "subprocess.Popen[bytes] | None", log: Path | None) -> None:
        """Hold on to what `start` has started."""
        self.port = port
        self.process = process
        self._log = log

    def stop(self) -> None:
        """End it, and everything it has started."""
        if self.process is not None:
            machine.stop(self.process)

    def last_words(self) -> str:
        """Return the end of what it has written."""
        return "" if self._log is None else self._log.read_text(errors="replace")[-2000:]


def _answers(port: int, body: bytes) -> bool:
    headers = {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return "usage" in json.loads(answer.read())
    except (OSError, ValueError):
        return False


def start(target: Target, around: Surroundings, cores: set[int], body: bytes) -> Running:
    """Start a target on those cores, and return when it has answered `body` well.

    Raises NotRunning where it does not within a minute.
    """
    if target.command is None:
        return Running(around.engines[0], None, None)
    port = machine.free_port()
    command = target.command(around, port)
    for name, text in command.files.items():
        (around.folder / name).write_text(text)
    log = around.folder / f"{target.name}.log"
    with machine.on_cores(cores), log.open("wb") as output:
        process = subprocess.Popen(
            command.words,
            stdout=output,
            stderr=output,
            cwd=around.folder,
            env={**os.environ, **_importable(), **command.environment},
            start_new_session=True,
        )
    running = Running(port, process, log)
    until = time.monotonic() + STARTS_IN_S
    while not _answers(port, body):
        if process.poll() is not None or time.monotonic() > until:
            running.stop()
            raise NotRunning(f"{target.name} did not start:\n{running.last_words()}")
        time.sleep(0.1)
    return running


def _importable() -> dict[str, str]:
    """Return what has the gateway of this checkout imported, whatever folder a process runs in."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
