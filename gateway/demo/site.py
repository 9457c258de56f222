"""The site that the demo runs: its fleet, and the configuration its gateway is started with.

The same in spirit as config/demo.yaml, which is not part of the installed package. Addresses are filled
in at run time, so that the demo needs no particular port to be free.
"""

from collections.abc import Mapping

MODEL = "gemma-4"
"""The name applications send."""

PROFILES: Mapping[str, str] = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "spark": "spark-nvfp4",
    "tpu": "tpu-v6e4-moe",
}
"""Which deployment each backend imitates."""

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

models:
  {model}:                        # the name applications send
    aliases: [google/gemma-4-31B-it]
    classes:                      # tried top to bottom; the first that matches wins
      - {{class: reasoning, when: {{reasoning: true}}, pools: [reasoning]}}
      - {{class: long_document, when: {{prompt_tokens: ">= 16000"}}, pools: [push]}}
      - {{class: short_chat, pools: [light, push]}}     # later pools are the spill order

health: {{interval_s: 0.5}}         # GPU time runs faster here than the clock
shutdown: {{drain_s: 2}}
"""


def config_text(urls: Mapping[str, str], port: int = 0) -> str:
    """Return the configuration for backends at `urls`; the gateway listens on `port`, 0 for a free one."""
    extra = {"spark": ", limits: {knee_seqs: 4}"}
    backends = "\n".join(
        f"  {name + ':':<9}{{url: {urls[name]}, profile: {profile}{extra.get(name, '')}}}"
        for name, profile in PROFILES.items()
    )
    return _CONFIG.format(port=port, backends=backends, model=MODEL)
