"""What a configuration means: one example in full, then what each section changes."""

import hashlib
import os
import re
import ssl
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.certificates import self_signed

from gateway import profiles
from gateway.core.backends import Gates, JobRoom, KneeStep, Modalities, Pool, Timeouts
from gateway.core.classification import classify
from gateway.core.errors import ConfigError
from gateway.core.policy import Bound, Comparison, When
from gateway.core.profile import Basis
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request
from gateway.settings import Address, CheckReport, Settings, check, load

Load = Callable[..., Settings]
Check = Callable[..., CheckReport]

EXAMPLE = """\
listen: 127.0.0.1:8080            # applications
admin: 127.0.0.1:9090             # operators; never exposed by default
tokenizer: approximate            # or {vocab: gemma4.tiktoken}: exact
backends:
  light-0: {url: http://127.0.0.1:9001, profile: h100-tp1-light}
  light-1: {url: http://127.0.0.1:9002, profile: h100-tp1-light}
  push:    {url: http://127.0.0.1:9003, profile: h100-tp2-push, api_key_env: PUSH_KEY}
  spark:   {url: http://127.0.0.1:9004, profile: spark-nvfp4, limits: {knee_seqs: 4}}
  tpu:     {url: http://127.0.0.1:9005, profile: tpu-v6e4-moe}
pools:
  light: [light-0, light-1]
  push: [push]
  reasoning: [tpu, spark]
models:
  gemma-4:                        # the name applications send; each backend gets its own served name
    aliases: [google/gemma-4-31B-it]
    classes:                      # tried top to bottom; the first that matches wins
      - {class: reasoning, when: {reasoning: true}, pools: [reasoning]}
      - {class: long_document, when: {prompt_tokens: ">= 16000"}, pools: [push]}
      - {class: short_chat, pools: [light, push]}     # later pools are the spill order
"""


def test_the_example_is_valid_and_says_what_it_cannot_do(checked: Check) -> None:
    report = checked(EXAMPLE, {"PUSH_KEY": "secret"})
    assert report.ok
    assert [(warning.line, warning.message) for warning in report.warnings] == [
        (
            18,
            "class reasoning admits prompts of any length; its largest backend (spark) holds 65,536 tokens: "
            "longer ones are refused with context_length_exceeded, though push holds 262,144",
        ),
        (
            19,
            "class long_document admits images and audio, which none of its backends (push) takes: "
            "such requests are refused; "
            "`images: false, audio: false` in its `when` leaves them to later classes",
        ),
        (
            20,
            "class short_chat admits audio, which none of its backends (light-0, light-1, push) takes: "
            "such requests are refused",
        ),
    ]


def test_the_example_means_what_it_says(loaded: Load) -> None:
    settings = loaded(EXAMPLE)
    assert settings.listen == Address("127.0.0.1", 8080)
    assert settings.admin == Address("127.0.0.1", 9090)
    assert settings.named.vocab is None
    policy = settings.policy()
    assert {name: pool.backends for name, pool in policy.pools.items()} == {
        "light": ("light-0", "light-1"),
        "push": ("push",),
        "reasoning": ("tpu", "spark"),
    }
    assert policy.backends["light-0"].url == "http://127.0.0.1:9001"
    assert policy.backends["light-0"].capacity == profiles.load("h100-tp1-light").capacity
    assert policy.backends["light-0"].model is None, "learned from the backend"
    assert policy.backends["spark"].capacity.knee == (KneeStep(None, 4),)
    assert policy.backends["spark"].capacity.kv_blocks == profiles.load("spark-nvfp4").capacity.kv_blocks
    assert policy.backends["spark"].modalities == Modalities(0, 0)
    assert policy.backends["tpu"].boot_budget_s == 1800
    (model,) = policy.models
    assert (model.id, model.aliases) == ("gemma-4", ("google/gemma-4-31B-it",))
    assert [(one.name, one.pools) for one in model.classes] == [
        ("reasoning", ("reasoning",)),
        ("long_document", ("push",)),
        ("short_chat", ("light", "push")),
    ]
    assert model.classes[1].when == When(prompt_tokens=(Bound(Comparison.GE, 16_000),))
    assert model.classes[2].when == When()


@pytest.mark.parametrize(
    ("tokens", "reasoning", "expected"),
    [
        pytest.param(300, False, "short_chat", id="a-chat"),
        pytest.param(15_999, False, "short_chat", id="just-below"),
        pytest.param(16_000, False, "long_document", id="at-the-threshold"),
        pytest.param(16_000, True, "reasoning", id="the-first-that-matches-wins"),
    ],
)
def test_the_example_classifies(loaded: Load, tokens: int, reasoning: bool, expected: str) -> None:
    (model,) = loaded(EXAMPLE).policy().models
    request = Request(Endpoint.CHAT, "gemma-4", Prompt(), reasoning=reasoning)
    found = classify(model, request, Estimate(tokens, tokens, CountMode.EXACT))
    assert found is not None
    assert found[0].name == expected


def test_the_version_is_a_short_hash_of_the_file(loaded: Load, plain: str) -> None:
    assert loaded(plain).policy().version == hashlib.sha256(plain.encode()).hexdigest()[:12]
    assert loaded(plain + "\n").policy().version != loaded(plain).policy().version


def test_a_plain_file_has_every_default(loaded: Load, plain: str) -> None:
    settings = loaded(plain)
    assert settings.warnings == ()
    assert (settings.listen, settings.admin) == (Address("127.0.0.1", 8080), Address("127.0.0.1", 9090))
    assert settings.policy().pools["light"] == Pool(
        "light", ("light",), Timeouts(), Gates(long_prefills=0, prefill_s=0.6)
    )
    assert settings.document.requests.max_body_bytes == 32 * 1024 * 1024
    assert settings.document.requests.remote_media is False
    assert {"chat_template", "input_ids", "draft_model"} <= {*settings.document.requests.drop_fields}
    assert settings.document.health.probation_successes == 3
    assert settings.document.shutdown.drain_s == 600
    assert settings.key_digests({}) is None


@pytest.mark.parametrize(
    ("classes", "pool", "room"),
    [
        pytest.param("", "{backends: [light]}", JobRoom(0.125, 0.5), id="callers-wait-for-its-chats"),
        pytest.param(", queue: {}", "{backends: [light]}", JobRoom(0.0, None), id="all-its-chats-are-jobs"),
        pytest.param(
            ", queue: {}", "{backends: [light], jobs: {reserve: 0.5}}", JobRoom(0.5, None), id="as-written"
        ),
        pytest.param("", "{backends: [light], jobs: {prefill_s: 2}}", JobRoom(0.125, 2.0), id="in-part"),
    ],
)
def test_jobs_leave_room_where_callers_wait(loaded: Load, classes: str, pool: str, room: JobRoom) -> None:
    file = f"""
tokenizer: approximate
backends: {{light: {{url: "http://127.0.0.1:1", profile: h100-tp1-light}}}}
pools: {{light: {pool}}}
models: {{gemma-4: {{classes: [{{class: chat, pools: [light]{classes}}}]}}}}
jobs: {{}}
"""
    assert loaded(file).policy().pools["light"].jobs == room


@pytest.mark.parametrize("written", ["off", "false", "null", "'off'"])
def test_admin_can_be_switched_off(loaded: Load, plain: str, written: str) -> None:
    assert loaded(f"admin: {written}\n{plain}").admin is None


@pytest.mark.parametrize(
    ("written", "address"),
    [
        pytest.param("0.0.0.0:80", Address("0.0.0.0", 80), id="everywhere"),
        pytest.param("'[::1]:8080'", Address("::1", 8080), id="v6"),
        pytest.param("localhost:0", Address("localhost", 0), id="any-free-port"),
        pytest.param("127.0.0.1:${PORT:-81}", Address("127.0.0.1", 81), id="from-the-environment"),
    ],
)
def test_listen(loaded: Load, plain: str, written: str, address: Address) -> None:
    assert loaded(f"listen: {written}\n{plain}").listen == address


@pytest.mark.parametrize(
    ("written", "origins"),
    [
        ("'*'", ("*",)),
        ("https://app.example.com", ("https://app.example.com",)),
        ("[http://localhost:3000, 'http://[::1]:3000']", ("http://localhost:3000", "http://[::1]:3000")),
        ("[https://App.Example.com]", ("https://app.example.com",)),
        ("['${PAGE:-https://intern}']", ("https://intern",)),
        ("['chrome-extension://abcdefgh', 'https://a:80']", ("chrome-extension://abcdefgh", "https://a:80")),
        ("[]", ()),
    ],
)
def test_origins_are_as_browsers_write_them(
    loaded: Load, plain: str, written: str, origins: tuple[str, ...]
) -> None:
    assert loaded(f"allowed_origins: {written}\n{plain}").document.allowed_origins == origins


def test_a_vocabulary_is_found_beside_the_file(loaded: Load, plain: str, tmp_path: Path) -> None:
    settings = loaded(plain.replace("approximate", "{vocab: gemma4.tiktoken}"))
    assert settings.named.vocab == tmp_path / "gemma4.tiktoken"
    (missing,) = settings.unmet({})
    assert (missing.line, missing.column) == (1, 20)
    (tmp_path / "gemma4.tiktoken").write_text("")
    assert settings.unmet({}) == ()


# ------------------------------------------------------------------ backends


def one(backend: str) -> str:
    return (
        f"tokenizer: approximate\nbackends:\n  b: {{url: http://127.0.0.1:1/, {backend}}}\n"
        "pools: {p: [b]}\nmodels: {m: {classes: [{class: c, pools: p}]}}\n"
    )


def test_limits_replace_the_profile_figure_by_figure(loaded: Load) -> None:
    written = "profile: h100-tp1-light, limits: {context_tokens: 16384, kv_blocks: 5000, kv_budget: 0.5}"
    capacity = loaded(one(written)).policy().backends["b"].capacity
    assert (capacity.context_tokens, capacity.kv_blocks, capacity.kv_budget) == (16_384, 5_000, 0.5)
    assert capacity.knee == profiles.load("h100-tp1-light").capacity.knee


def test_a_null_for_kv_blocks_leaves_kv_to_the_engine(loaded: Load) -> None:
    assert (
        loaded(one("profile: spark-fp8, limits: {kv_blocks: null}")).policy().backends["b"].capacity.kv_blocks
        is None
    )
    assert loaded(one("profile: spark-fp8, limits: {}")).policy().backends["b"].capacity.kv_blocks == 525_000
    assert loaded(one("profile: spark-fp8, limits: ")).policy().backends["b"].capacity.kv_blocks == 525_000


def test_a_knee_may_be_a_curve(loaded: Load) -> None:
    curve = '[{prompt_tokens: "<= 2000", seqs: 40}, {prompt_tokens: "<= 16_000", seqs: 20}, {seqs: 8}]'
    backend = loaded(one(f"profile: h100-tp1-light, limits: {{knee_seqs: {curve}}}")).policy().backends["b"]
    assert backend.capacity.knee == (KneeStep(2_000, 40), KneeStep(16_000, 20), KneeStep(None, 8))


@pytest.mark.parametrize(
    ("written", "modalities"),
    [
        pytest.param("profile: h100-tp2-push", Modalities(0, 0), id="the-profile's"),
        pytest.param(
            "profile: h100-tp2-push, modalities: {images_max: null}", Modalities(None, 0), id="no-limit"
        ),
        pytest.param("profile: tpu-v6e4-moe, modalities: {images_max: 2}", Modalities(2, 1), id="fewer"),
        pytest.param("profile: tpu-v6e4-moe, modalities: {audios_max: 0}", Modalities(4, 0), id="none"),
    ],
)
def test_modalities(loaded: Load, written: str, modalities: Modalities) -> None:
    assert loaded(one(written)).policy().backends["b"].modalities == modalities


@pytest.mark.parametrize(
    ("written", "quirks"),
    [
        pytest.param("", ("unmeasured_batches", "tool_choice_not_enforced"), id="the-profile's"),
        pytest.param(
            "quirks: {add: [tool_markup_leaks], remove: unmeasured_batches}",
            ("tool_choice_not_enforced", "tool_markup_leaks"),
            id="its-own",
        ),
    ],
)
def test_quirks(loaded: Load, written: str, quirks: tuple[str, ...]) -> None:
    found = loaded(one(f"profile: spark-moe-fp8, {written}")).policy().backends["b"].quirks
    kept = [quirk for quirk in found if quirk not in ("long_prefill_stalls", "oversized_kv_deadlock")]
    assert tuple(kept) == quirks


@pytest.mark.parametrize("path", ["", "/one", "/one/b-1.x_~/c%20d"])
def test_backends_of_one_proxy_have_paths(loaded: Load, plain: str, path: str) -> None:
    given = plain.replace("http://127.0.0.1:9001", f"http://proxy{path}/")
    (name,) = loaded(given).policy().pools["light"].backends[:1]
    backends = loaded(given.replace("http://127.0.0.1:9002", "http://proxy/two")).policy().backends

    assert backends[name].url == f"http://proxy{path}"
    assert "http://proxy/two" in [one.url for one in backends.values()]


def test_the_rest_of_a_backend(loaded: Load) -> None:
    backend = (
        loaded(one("profile: spark-nvfp4, model: gemma4-31b, drain: true, boot_budget_s: 900"))
        .policy()
        .backends["b"]
    )
    assert backend.url == "http://127.0.0.1:1", "without its slash"
    assert (backend.model, backend.drain, backend.boot_budget_s) == ("gemma4-31b", True, 900)
    assert backend.profile == "spark-nvfp4"
    assert backend.tokens_per_s == pytest.approx(6.8, rel=0.01)


# ------------------------------------------------------------------ profiles of the site


def test_a_site_profile_starts_from_a_shipped_one(loaded: Load) -> None:
    own = """\
profiles:
  hot:
    extends: h100-tp1-light
    title: Hotter
    capacity:
      kv_blocks: {value: 388875, basis: derived, source: 102K logged tokens}
      knee: [{prompt_tokens: "<= 2000", seqs: 48}, {seqs: 10}]
      kv: {sliding_layers: 1, global_layers: 2}
    modalities: {images_max: 2}
    flags: {max_num_seqs: null, reserve_full_isl: true}
    perf: {accept: 2.5, kv_span: {value: 1e-6, basis: fitted, source: ours}}
    boot_s: 100
"""
    settings = loaded(own + one("profile: hot"))
    profile, base = settings.profile("b"), profiles.load("h100-tp1-light")
    assert (profile.name, profile.title, profile.hardware) == ("hot", "Hotter", base.hardware)
    assert profile.capacity.kv_blocks == 388_875
    assert profile.capacity.knee == (KneeStep(2_000, 48), KneeStep(None, 10))
    assert profile.capacity.kv is not None and profile.capacity.kv.global_block_tokens == 32
    assert profile.capacity.context_tokens == base.capacity.context_tokens
    assert profile.modalities == Modalities(2, 0)
    assert (profile.flags.max_num_seqs, profile.flags.reserve_full_isl) == (None, True)
    assert (profile.perf.accept, profile.perf.kv_span, profile.perf.t_mem) == (2.5, 1e-6, base.perf.t_mem)
    assert profile.boot_s == 100
    assert profile.provenance["capacity.kv_blocks"].basis is Basis.DERIVED
    assert profile.provenance["perf.accept"].basis is Basis.GUESSED, "a bare value says nothing about itself"
    assert profile.provenance["perf.accept"].source == "site configuration"
    assert settings.policy().backends["b"].capacity == profile.capacity


def test_a_site_profile_may_take_the_place_of_a_shipped_one(loaded: Load) -> None:
    own = "profiles: {spark-fp8: {extends: spark-fp8, capacity: {knee: 8}}}\n"
    assert loaded(own + one("profile: spark-fp8")).policy().backends["b"].capacity.knee == (
        KneeStep(None, 8),
    )


# ------------------------------------------------------------------ pools, models, routing


def test_a_pool_takes_what_it_does_not_say_from_the_top(loaded: Load, plain: str) -> None:
    bent = plain.replace("push: [push]", "push: {backends: push, timeouts: {first_byte_s: 900}}")
    pools = loaded(bent + "timeouts: {connect_s: 1, idle_s: 60}\n").policy().pools
    assert pools["push"].timeouts == Timeouts(connect_s=1, first_byte_s=900, idle_s=60, total_s=3600)
    assert pools["light"].timeouts == Timeouts(connect_s=1, first_byte_s=600, idle_s=60, total_s=3600)


def test_every_condition_reaches_the_policy(loaded: Load, plain: str) -> None:
    condition = (
        'prompt_tokens: ">= 10, < 20", total_tokens: "<= 90", max_tokens: 5, images: true, audio: false, '
        "tools: '> 2', reasoning: false, stream: true, key: [a], header: {X-Team: [s, t], x-any: true}"
    )
    keys = f"keys: {{a: {{sha256: '{'0' * 64}'}}}}\n"
    bent = plain.replace("- {class: image, when: {images: true}", f"- {{class: image, when: {{{condition}}}")
    (model,) = loaded(bent + keys).policy().models
    assert model.classes[0].when == When(
        prompt_tokens=(Bound(Comparison.GE, 10), Bound(Comparison.LT, 20)),
        total_tokens=(Bound(Comparison.LE, 90),),
        max_tokens=(Bound(Comparison.EQ, 5),),
        images=(Bound(Comparison.GT, 0),),
        audios=(Bound(Comparison.EQ, 0),),
        tools=(Bound(Comparison.GT, 2),),
        reasoning=False,
        stream=True,
        keys=("a",),
        headers=(("x-team", ("s", "t")), ("x-any", ())),
    )


def test_the_rest_of_a_model(loaded: Load, plain: str) -> None:
    own = (
        "    reasoning_aliases: [thinker]\n"
        "    prompt: {image_tokens: 1120, empty_thought_tokens: 0, audio_tokens: 100}\n"
    )
    bent = plain.replace("pools: [light, push]}", "pools: [light, push], output_reserve_tokens: 256}") + own
    policy = loaded(bent).policy()
    model = policy.model("thinker")
    assert model is not None and model.id == "gemma-4"
    assert (model.template.image, model.template.empty_thought, model.template.audio) == (1120, 0, 100)
    assert [one.output_reserve_tokens for one in model.classes] == [1024, 1024, 256]


def test_routing(loaded: Load, plain: str) -> None:
    policy = loaded(plain + "routing: {weights: {speed: 0, prefix_affinity: 2}, attempts_max: 5}\n").policy()
    assert (policy.weights.spare_knee, policy.weights.speed, policy.weights.prefix_affinity) == (1, 0, 2)
    assert policy.retry.attempts_max == 5


# ------------------------------------------------------------------ secrets


@pytest.mark.parametrize(
    ("named", "environ", "key"),
    [
        pytest.param("", {}, None, id="none"),
        pytest.param(", api_key_env: B_KEY", {"B_KEY": "s3cret\n"}, "s3cret", id="variable"),
        pytest.param(", api_key_file: b.key", {}, "from-file", id="file-beside-the-configuration"),
        pytest.param(", api_key_file: notepad.key", {}, "from-file", id="file-with-a-byte-order-mark"),
    ],
)
def test_a_backends_key(
    loaded: Load, tmp_path: Path, named: str, environ: Mapping[str, str], key: str | None
) -> None:
    (tmp_path / "b.key").write_text("from-file\n")
    (tmp_path / "notepad.key").write_bytes(b"\xef\xbb\xbffrom-file\r\n")
    settings = loaded(one(f"profile: spark-fp8{named}"))
    assert settings.backend_key("b", environ) == key
    assert settings.unmet(environ) == ()


def test_a_file_in_another_encoding_is_refused_with_the_line_where_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_bytes(one("profile: spark-fp8").encode() + "# Spark fürs Büro\n".encode("latin-1"))
    (problem,) = check(path).problems
    assert "is not UTF-8 text" in problem.message
    assert "in line 6)" in problem.message


def test_a_file_with_two_keys_is_no_callers_key(checked: Check, tmp_path: Path) -> None:
    (tmp_path / "two.key").write_text("sk-one\nsk-two\n")
    (warning,) = checked(one("profile: spark-fp8") + "keys: {a: {file: two.key}}\n").warnings
    assert warning.message == f"{tmp_path / 'two.key'} has a character that no header can carry"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        pytest.param("api_key_env: B_KEY", "environment variable B_KEY is not set", id="variable"),
        pytest.param("api_key_env: sk-1", "no such environment variable: name one", id="the-key-itself"),
        pytest.param("api_key_file: b.key", "b.key cannot be read: No such file", id="file"),
        pytest.param("api_key_file: empty.key", "empty.key is empty", id="empty-file"),
        pytest.param("api_key_file: pipe.key", "pipe.key cannot be read: it is not a regular", id="pipe"),
    ],
)
def test_a_key_that_is_not_there_warns_in_check_and_stops_serve(
    loaded: Load, checked: Check, tmp_path: Path, named: str, message: str
) -> None:
    (tmp_path / "empty.key").write_text("\n")
    os.mkfifo(tmp_path / "pipe.key")
    text = one(f"profile: spark-fp8, {named}")
    report = checked(text)
    assert report.ok
    (warning,) = report.warnings
    assert message in warning.message
    assert warning.line == 3
    assert "sk-1" not in warning.message
    settings = loaded(text)
    with pytest.raises(ConfigError, match=message):
        settings.backend_key("b", {})
    with pytest.raises(ConfigError, match=f"gateway.yaml:3:.*{message}"):
        settings.require({})


@pytest.mark.parametrize(
    ("backend", "rest", "place", "message"),
    [
        pytest.param("api_key_file: two.lines", "", (3, 68), "a character that no header", id="key"),
        pytest.param(
            "tls: {ca_file: two.lines}", "", (3, 69), "two.lines holds no certificates", id="authorities"
        ),
        pytest.param(
            "drain: false", "decisions: {file: there/d.jsonl}", (6, 19), "there is no folder", id="folder"
        ),
        pytest.param(
            f"tls: {{ca_file: {'x' * 300}}}", "", (3, 69), "x cannot be read: File name", id="not-examined"
        ),
        pytest.param("drain: false", "decisions: {file: .}", (6, 19), "is a folder", id="decisions-folder"),
        pytest.param("drain: false", "jobs: {data_dir: two.lines}", (6, 18), "is not a folder", id="jobs"),
    ],
)
def test_what_is_there_and_cannot_be_used_warns_in_check_and_stops_serve(
    loaded: Load,
    checked: Check,
    tmp_path: Path,
    backend: str,
    rest: str,
    place: tuple[int, int],
    message: str,
) -> None:
    (tmp_path / "two.lines").write_text("one\ntwo\n")
    text = one(f"profile: spark-fp8, {backend}").replace("http:", "https:") + rest
    report = checked(text)
    assert report.ok
    (warning,) = (one for one in report.warnings if message in one.message)
    assert (warning.line, warning.column) == place
    with pytest.raises(ConfigError, match=message):
        loaded(text).require({})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param("cert_file: own.pem, key_file: own.key", "", id="both"),
        pytest.param("cert_file: together.pem", "", id="in-one-file"),
        pytest.param("cert_file: own.pem", "own.pem is no certificate with its key", id="no-key"),
        pytest.param("cert_file: own.pem, key_file: other.key", "other.key is no cert", id="another"),
        pytest.param("cert_file: own.pem, key_file: locked.key", "locked.key: .*encrypted", id="enc"),
        pytest.param("cert_file: none.pem", "there is no file", id="missing"),
    ],
)
def test_a_client_certificate_and_its_key_belong_together(
    loaded: Load, checked: Check, tmp_path: Path, files: str, message: str
) -> None:
    for name, host in (("own", "a"), ("other", "b")):
        (tmp_path / host).mkdir()
        cert, key = self_signed(tmp_path / host, "localhost")
        cert.rename(tmp_path / f"{name}.pem")
        key.rename(tmp_path / f"{name}.key")
    together = (tmp_path / "own.pem").read_bytes() + (tmp_path / "own.key").read_bytes()
    (tmp_path / "together.pem").write_bytes(together)
    locked = ["-in", str(tmp_path / "own.key"), "-aes256", "-passout", "pass:word"]
    subprocess.run(["openssl", "pkey", *locked, "-out", str(tmp_path / "locked.key")], check=True)
    text = one(f"profile: spark-fp8, tls: {{{files}}}").replace("http:", "https:")

    said = [one.message for one in checked(text).warnings if one.line == 3]
    if message:
        assert any(re.search(message, one) for one in said), said
        with pytest.raises(ConfigError, match=message):
            loaded(text).require({})
    else:
        assert said == []
        loaded(text).require({})
        assert loaded(text).named.tls("b").context().verify_mode is ssl.CERT_REQUIRED


def test_a_key_without_a_certificate(checked: Check) -> None:
    (problem,) = checked(
        one("profile: spark-fp8, tls: {key_file: own.key}").replace("http:", "https:")
    ).problems
    assert problem.message == "there is no cert_file that it belongs to"
    assert problem.line == 3


def test_authorities_that_nobody_asks_may_be_anything(checked: Check, tmp_path: Path) -> None:
    (tmp_path / "two.lines").write_text("one\ntwo\n")
    report = checked(
        one("profile: spark-fp8, tls: {ca_file: two.lines, verify: false}").replace("http:", "https:")
    )
    assert not any("holds no" in warning.message for warning in report.warnings)


def test_caller_keys_are_digests_whatever_they_come_from(loaded: Load, plain: str, tmp_path: Path) -> None:
    (tmp_path / "c.key").write_text("gamma\n")
    digest = {word: hashlib.sha256(word.encode()).digest() for word in ("alpha", "beta", "gamma")}
    keys = f"keys: {{a: {{sha256: {digest['alpha'].hex()}}}, b: {{env: B}}, c: {{file: c.key}}}}\n"
    settings = loaded(plain + keys)
    assert settings.key_digests({"B": "beta"}) == {
        "a": digest["alpha"],
        "b": digest["beta"],
        "c": digest["gamma"],
    }
    with pytest.raises(ConfigError, match="key b: environment variable B"):
        settings.key_digests({})


def test_a_key_that_is_not_text(loaded: Load, plain: str) -> None:
    settings = loaded(plain + "keys: {b: {env: B}}\n")
    environ = {"B": os.fsdecode(b"s3cr\xfft")}

    assert [one.message for one in settings.unmet(environ)] == ["environment variable B is not text"]
    with pytest.raises(ConfigError, match="key b: environment variable B is not text"):
        settings.key_digests(environ)


def test_settings_do_not_show_what_the_environment_filled_in(loaded: Load, plain: str) -> None:
    settings = loaded(plain.replace("push: {url", "push: {model: '${NAME}', url"), {"NAME": "served"})
    assert settings.policy().backends["push"].model == "served"
    assert "tree" not in repr(settings)


def test_tls(loaded: Load, tmp_path: Path) -> None:
    https = one("profile: spark-fp8, tls: {ca_file: ca.pem, verify: false}").replace("http:", "https:")
    settings = loaded(https)
    assert settings.named.tls("b").ca_file == tmp_path / "ca.pem"
    assert settings.named.tls("b").verify is False
    assert [problem.message for problem in settings.unmet({})] == [f"there is no file {tmp_path / 'ca.pem'}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param("ssl_ca_certs={ca}&ssl_certfile={own}&ssl_keyfile={key}", None, id="usable"),
        pytest.param("ssl_ca_certs={ca}.old", "ssl_ca_certs: there is no file .*/ca.pem.old", id="missing"),
        pytest.param("ssl_ca_certs={key}", ".*key.pem holds no certificates", id="no-certificates"),
        pytest.param("ssl_certfile={ca}&ssl_keyfile={key}", ".*is no certificate with its key", id="key"),
        pytest.param("ssl_certfile={ca}&ssl_keyfile={key}&ssl_password=x", None, id="maybe-encrypted"),
    ],
)
def test_tls_files_of_the_store(
    loaded: Load, plain: str, tmp_path: Path, options: str, message: str | None
) -> None:
    (tmp_path / "other").mkdir()
    ca, own = self_signed(tmp_path / "other", "localhost")[0], self_signed(tmp_path, "localhost")
    names = {"ca": ca.rename(tmp_path / "ca.pem"), "own": own[0], "key": own[1].rename(tmp_path / "key.pem")}
    settings = loaded(plain + f"store: {{url: 'rediss://:pass@store:1?{options.format(**names)}'}}\n")

    found = [one.message for one in settings.unmet({})]

    assert len(found) == (message is not None)
    assert message is None or re.match(message, found[0])


@pytest.mark.parametrize(
    ("written", "lacking"),
    [
        ("decisions: {file: ~nobody-here/d.jsonl}\n", "there is no folder %s/~nobody-here"),
        (
            "keys: {a: {file: ~nobody-here/a.key}}\n",
            "%s/~nobody-here/a.key cannot be read: No such file or directory",
        ),
        ("jobs: {data_dir: ~nobody-here/jobs}\n", "there is no home directory ~nobody-here"),
    ],
)
def test_the_home_of_somebody_whom_this_machine_does_not_know(
    loaded: Load, plain: str, tmp_path: Path, written: str, lacking: str
) -> None:
    (found,) = loaded(plain + written).unmet({})

    assert found.message == lacking.replace("%s", str(tmp_path))


def test_a_vocabulary_in_a_home_that_is_not_there(loaded: Load, plain: str, tmp_path: Path) -> None:
    settings = loaded(plain.replace("approximate", "{vocab: ~nobody-here/v}"))

    lacking = f"there is no file {tmp_path / '~nobody-here/v'}: `gemma-gateway vocab build` makes it"
    assert [one.message for one in settings.unmet({})] == [lacking]


def test_the_summary_says_where_requests_go(loaded: Load) -> None:
    assert loaded(EXAMPLE).summary == (
        "5 backends in 3 pools",
        "  pool light: light-0 (h100-tp1-light, 127.0.0.1:9001), light-1 (h100-tp1-light, 127.0.0.1:9002)",
        "  pool push: push (h100-tp2-push, 127.0.0.1:9003)",
        "  pool reasoning: tpu (tpu-v6e4-moe, 127.0.0.1:9005), spark (spark-nvfp4, 127.0.0.1:9004)",
        "model gemma-4: 3 classes, first match wins",
        "  reasoning -> reasoning",
        "  long_document -> push",
        "  short_chat -> light, then push",
        "prompts are counted approximately; open to everyone",
    )


@pytest.mark.parametrize(
    ("admin", "number", "own"),
    [
        ("127.0.0.1:9090", 0, Address("127.0.0.1", 9090)),
        ("127.0.0.1:9090", 2, Address("127.0.0.1", 9092)),
        ("'[::1]:9090'", 1, Address("::1", 9091)),
        ("127.0.0.1:0", 3, Address("127.0.0.1", 0)),
        ("off", 1, None),
        ("127.0.0.1:65534", 1, Address("127.0.0.1", 65535)),
    ],
)
def test_each_worker_has_a_port_for_operators(
    loaded: Load, plain: str, admin: str, number: int, own: Address | None
) -> None:
    settings = loaded(f"admin: {admin}\n{plain}").for_worker(number, 4, None)

    assert settings.admin == own
    assert settings.document.store is None


def test_a_worker_without_a_port_for_operators_is_a_configuration_error(loaded: Load, plain: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.yaml:1:8: worker 2 would need admin port 65536"):
        loaded(f"admin: 127.0.0.1:65534\n{plain}").for_worker(2, 4, None)


def test_a_worker_whose_port_for_operators_is_that_for_applications_is_a_configuration_error(
    loaded: Load, plain: str
) -> None:
    settings = loaded(f"listen: 0.0.0.0:9091\nadmin: 127.0.0.1:9090\n{plain}")
    assert settings.for_worker(0, 2, None).admin == Address("127.0.0.1", 9090)
    with pytest.raises(ConfigError, match=r"gateway\.yaml:2:8: worker 1 would need admin port 9091, which"):
        settings.for_worker(1, 2, None)


@pytest.mark.parametrize(
    ("line", "url", "prefix"),
    [
        ("", "unix:///run/own", "gw"),
        ("store: {url: 'redis://there', prefix: fleet}\n", "redis://there", "fleet"),
    ],
)
def test_workers_share_the_store_of_the_file_or_one_of_their_own(
    loaded: Load, plain: str, line: str, url: str, prefix: str
) -> None:
    store = loaded(line + plain).for_worker(0, 4, "unix:///run/own").document.store

    assert store is not None
    assert (store.url, store.prefix) == (url, prefix)


def test_what_was_read_once_is_not_read_again(write: Callable[[str], Path], plain: str) -> None:
    path = write(plain)
    first = load(path, {})
    path.write_text("no configuration any more")

    assert load(path, {}, source=first.source).version == first.version


# ------------------------------------------------------------------ workers of jobs


@pytest.mark.parametrize(
    ("jobs", "serves", "shares"),
    [("{}", True, False), ("{work_in_serve: false}", False, True)],
    ids=["one-process", "workers-of-their-own"],
)
def test_who_works_jobs_off_and_shares_limits_for_it(
    loaded: Load, plain: str, jobs: str, serves: bool, shares: bool
) -> None:
    settings = loaded(f"{plain}jobs: {jobs}\n").with_jobs_at("unix:///kept")
    assert settings.works_jobs is serves
    assert (settings.document.store is not None) is shares
    assert settings.jobs_store is not None
    assert settings.jobs_store.url == "unix:///kept"


@pytest.mark.parametrize(
    ("admin", "own"),
    [(None, Address("127.0.0.1", 9090)), ("[::1]:91", Address("::1", 91)), ("off", None)],
)
def test_a_worker_of_jobs_works_and_has_an_admin_port_of_its_own(
    loaded: Load, plain: str, admin: str | None, own: Address | None
) -> None:
    settings = loaded(f"{plain}jobs: {{work_in_serve: false}}\n").for_job_worker(admin)
    assert settings.works_jobs
    assert settings.admin == own
    assert not loaded(plain).works_jobs


@pytest.mark.parametrize(("least", "max_wait_s"), [(7_999, 1.2), (8_000, 900.0)])
def test_documents_begin_at_a_length(loaded: Load, plain: str, least: int, max_wait_s: float) -> None:
    (model,) = loaded(plain.replace(">= 16000", f">= {least}")).policy().models
    assert model.classes[1].waiting.max_wait_s == max_wait_s
