"""The site that the demo runs: its fleet, and the configuration its gateway is started with.

The same in spirit as config/demo.yaml, which is not part of the installed package. Addresses are filled
in at run time, so that the demo needs no particular port to be free.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from gateway.core.errors import ConfigError
from gateway.store.embedded import SOCKET_PATH_MAX, server_binary, socket_path

MODEL = "gemma-4"
"""The name applications send."""

QWEN = "qwen"
"""The other model of the box, the backend that runs it, and what applications call it."""

BOX = "spark-box"
"""The machine that `spark` and `qwen` share, and where it takes orders among the fleet's URLs."""

PROFILES: Mapping[str, str] = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "spark": "spark-nvfp4",
    "tpu": "tpu-v6e4-moe",
    QWEN: "spark-nvfp4",
}
"""As which deployment the gateway knows each backend."""

BOXED: Mapping[str, str] = {"spark": "spark-nvfp4", QWEN: "qwen"}
"""Which deployments take turns on the box, as they are simulated; the first is in at the start."""

BOOT_S = 45.0
"""Engine seconds that a model of the box takes to boot. A choice: the real one takes 306."""

JOBS = 6
"""Jobs for Qwen that are handed over, and that bring it in. A choice: enough to see them end one by one."""

_CONFIG = """\
# What `gemma-gateway demo` runs its gateway with. docs/configuration.md explains every key.
listen: 127.0.0.1:{port}
admin: 127.0.0.1:0
tokenizer: approximate            # no weights here, hence no vocabulary to count with

backends:
{backends}

pools:
  light: [light-0, light-1]
  push: [push]
  reasoning: [tpu, spark]
  qwen: [qwen]

boxes:
  {box}:                      # one machine, one memory: one model is in at a time
    default: spark
    residency_s: 1
    backends:
      spark:
        jobs: 1                   # one request that waits for Gemma brings it back
        http:
          start: {{url: "{control}/models/spark/start"}}
          stop: {{url: "{control}/models/spark/stop?wait=true"}}
      qwen:
        jobs: {jobs}                   # so many jobs bring Qwen in
        http:
          start: {{url: "{control}/models/qwen/start"}}
          stop: {{url: "{control}/models/qwen/stop?wait=true"}}

models:
  {model}:                        # the name applications send
    aliases: [google/gemma-4-31B-it]
    classes:                      # tried top to bottom; the first that matches wins
      - class: reasoning
        when: {{reasoning: true}}
        pools: [reasoning]
        waiting: {{max_wait_s: 900, ttft_target_s: 2700}}    # it may have to wait for Gemma to come back
      - {{class: long_document, when: {{prompt_tokens: ">= 16000"}}, pools: [push]}}
      - {{class: short_chat, pools: [light, push]}}     # later pools are the spill order
  {qwen}:
    classes: [{{class: qwen, pools: [qwen], waiting: {{max_wait_s: 900, ttft_target_s: 2700}}}}]

{kept}
health: {{interval_s: 0.5}}         # GPU time runs faster here than the clock
shutdown: {{drain_s: 2}}
"""


def keeps_jobs(folder: Path) -> str:
    """Return why no jobs can be kept in a folder; "" where they can."""
    try:
        server_binary()
    except ConfigError as error:
        return str(error)
    if len(os.fsencode(socket_path(folder))) > SOCKET_PATH_MAX:
        return f"the path of {folder} is too long for a socket"
    return ""


def config_text(urls: Mapping[str, str], port: int = 0, data: Path | None = None) -> str:
    """Return the configuration for backends at `urls`; the gateway listens on `port`, 0 for a free one.

    Jobs are kept in `data`; there are none if that is None.
    """
    extra = dict.fromkeys(BOXED, ", limits: {knee_seqs: 4}")
    backends = "\n".join(
        f"  {name + ':':<9}{{url: {urls[name]}, profile: {profile}{extra.get(name, '')}}}"
        for name, profile in PROFILES.items()
    )
    return _CONFIG.format(
        port=port,
        backends=backends,
        model=MODEL,
        qwen=QWEN,
        box=BOX,
        control=urls[BOX],
        jobs=JOBS,
        kept="" if data is None else f"jobs: {{data_dir: {json.dumps(str(data))}}}\n",
    )
