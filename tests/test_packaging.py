"""What is shipped: the installed package, the lock file, the image, the unit, and every tracked file."""

import configparser
import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gateway import settings

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SKIPPED = {".git", ".venv", "venv", "build", "dist", "__pycache__", "node_modules"}


def files(folder: Path) -> list[Path]:
    """Return the files below a folder that are neither caches nor someone's virtual environment."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in SKIPPED and not name.endswith(("_cache", "-info"))
        ]
        found += [Path(where, name) for name in names if not name.endswith(".pyc")]
    return sorted(found)


# ------------------------------------------------------------------ the package


def test_the_package_has_all_its_data() -> None:
    expected = {path.relative_to(ROOT / "gateway").as_posix() for path in files(ROOT / "gateway")}
    installed = resources.files("gateway")
    assert {name for name in expected if not installed.joinpath(name).is_file()} == set()
    assert "py.typed" in expected
    assert len([name for name in expected if re.fullmatch(r"profiles/[\w-]+\.yaml", name)]) == 11


def test_the_command_is_installed_under_its_name() -> None:
    (command,) = [entry for entry in metadata.distribution("gemma-gateway").entry_points if entry.name]
    assert (command.group, command.name, command.value) == (
        "console_scripts",
        "gemma-gateway",
        "gateway.__main__:main",
    )


def test_its_version_is_what_the_package_says() -> None:
    import gateway

    assert metadata.version("gemma-gateway") == gateway.__version__


# ------------------------------------------------------------------ the lock file

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
ENTRY = re.compile(
    r"^([a-z0-9][a-z0-9.-]*)==(\S+)( ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def locked() -> dict[str, Version]:
    return {match[1]: Version(match[2]) for match in ENTRY.finditer(LOCK)}


def test_the_lock_file_is_pins_and_hashes_and_nothing_else() -> None:
    assert ENTRY.sub("", LOCK) == ""
    assert "/" not in LOCK  # no address, no path


def test_the_lock_file_covers_every_dependency() -> None:
    pins = locked()
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text


def test_the_lock_file_covers_what_the_dependencies_need() -> None:
    # By the metadata of what is installed here: another platform's extra needs are beyond this test.
    pins = locked()
    missing = [
        f"{name} needs {text}"
        for name, version in pins.items()
        if name in INSTALLED and metadata.version(name) == str(version)
        for text in metadata.requires(name) or ()
        for needed in [Requirement(text)]
        if (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        and canonicalize_name(needed.name) not in pins
    ]
    assert missing == []


INSTALLED = {canonicalize_name(found.metadata["Name"]) for found in metadata.distributions()}


# ------------------------------------------------------------------ the Node SDK that tests use

NODE = ROOT / "tests" / "node"


def test_the_node_packages_are_pinned_by_hash_and_name_no_registry() -> None:
    wanted = json.loads((NODE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    packages = json.loads((NODE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert packages.pop("")["dependencies"] == wanted
    assert {path.removeprefix("node_modules/") for path in packages} == set(wanted)
    for path, package in packages.items():
        assert "resolved" not in package, path
        assert package["integrity"].startswith("sha512-"), path


def test_the_readme_names_the_node_packages_that_are_proven() -> None:
    packages = json.loads((NODE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    (proven,) = re.findall(r"^Tested unmodified: .*$", (ROOT / "README.md").read_text("utf-8"), re.M)
    for version in (package["version"] for path, package in packages.items() if path):
        assert version.rpartition(".")[0] in proven


def test_what_npm_installs_is_never_shipped() -> None:
    assert "node_modules/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert [path for path in tracked() if "node_modules" in path.parts] == []


# ------------------------------------------------------------------ the image, the unit, the compose file

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DRAIN_S = settings.ShutdownSection().drain_s


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile, continued lines joined."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(pair[0], " ".join(pair[1].split())) for pair in pairs]


def last(instruction: str) -> str:
    return [arguments for name, arguments in instructions() if name == instruction][-1]


def test_the_image_is_built_from_a_named_version() -> None:
    bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"python:3\.\d+(\.\d+)?-slim-\w+", base), base


def test_the_image_installs_by_hash_and_runs_as_nobody_in_particular() -> None:
    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    assert any("--require-hashes" in run and "requirements.lock" in run for run in runs)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))
    assert last("ENTRYPOINT") == '["gemma-gateway"]'  # no shell, so that signals arrive
    assert last("HEALTHCHECK").split(" CMD ")[1].startswith("[")


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    }
    copied = {
        source
        for name, arguments in instructions()
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_takes_the_same_interpreter_as_the_project() -> None:
    version = re.match(r"python:(3\.\d+)", last("FROM"))
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]


@pytest.mark.parametrize("name", ["gemma-gateway", "gemma-gateway-worker"])
def test_the_units_let_streams_finish_and_reload_by_a_signal(name: str) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / f"{name}.service", encoding="utf-8")
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > DRAIN_S
    assert service["KillSignal"] == "SIGTERM"
    if name == "gemma-gateway":
        assert service["KillMode"] == "mixed"  # the workers' store must outlive their drain
        assert service["DynamicUser"] == "yes"  # who may write nowhere else:
        assert f"/var/lib/{service['StateDirectory']}/jobs" in (ROOT / "deploy" / "README.md").read_text()
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"  # on which it reads its file again
    assert service["RestartPreventExitStatus"] == "2"
    assert service["Restart"] == "always"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"  # by default systemd gives up after five in 10 s


@pytest.mark.parametrize(("name", "port"), [("gateway", "9090"), ("worker", "9091")])
def test_the_compose_file_lets_streams_finish_and_hides_the_admin_port(name: str, port: str) -> None:
    composed = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    service = composed["services"][name]
    assert float(service["stop_grace_period"].removesuffix("s")) > DRAIN_S
    assert f"127.0.0.1:{port}:9090" in service["ports"]
    assert service["read_only"] is True


def test_the_container_s_configuration_is_valid() -> None:
    report = settings.check(ROOT / "deploy" / "gateway.yaml")
    assert report.problems == ()
    assert settings.load(ROOT / "deploy" / "gateway.yaml").listen == ("0.0.0.0", 8080)


# ------------------------------------------------------------------ every tracked file

MACHINE_PATH = re.compile(r"(?<![\w.$}-])/(?:root|work|Users|home|opt/(?!gemma-gateway\b))/?[\w.-]*")
INDEX_HOST = re.compile(
    r"pypi\.org|python" r"hosted\.org|--(?:extra-)?index" r"-url|--find" r"-links|npmjs\.(?:org|com)", re.I
)
NAMES_AN_OPTION = {".ci/lock"}  # switches off that the lock file names one


def tracked() -> list[Path]:
    """Return what git tracks or would; without git, everything here."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        return sorted(ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file())
    return files(ROOT)


@pytest.mark.parametrize(
    ("what", "pattern"), [("path", MACHINE_PATH), ("index", INDEX_HOST)], ids=["path", "index"]
)
def test_no_file_names_a_machine_s_path_or_an_index_host(what: str, pattern: re.Pattern[str]) -> None:
    found = []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_bytes().decode("utf-8", errors="replace")
        for match in pattern.finditer(text):
            if not (what == "index" and name in NAMES_AN_OPTION):
                found.append(f"{name}: {match[0]}")
    assert found == []


def test_no_vocabulary_is_in_the_repository() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in tracked()]
    assert [name for name in names if name.endswith((".tiktoken", "tokenizer.json", ".model", ".spm"))] == []
    assert [name for name in names if (ROOT / name).stat().st_size > 1_000_000] == []


SCRIPTS = [f".ci/{name}" for name in ("run", "check", "lock", "node-sdk", "prometheus", "proxies", "browser")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_run_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)
