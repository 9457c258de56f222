"""The Node SDK for tests: where it is, and what its checks say.

TEST_NODE_SDK names a folder that `.ci/node-sdk FOLDER` has filled. Without it the tests that need it are
skipped, because the others need nothing but Python; with it they run, and fail where it holds no SDK.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

ENVIRON = "TEST_NODE_SDK"
CHECKS = Path(__file__).parents[1] / "node"
SDKS = tuple(json.loads((CHECKS / "package.json").read_text())["dependencies"])
WITHOUT = f"no Node SDK: `.ci/node-sdk FOLDER` fetches it, {ENVIRON}=FOLDER has the tests use it"
GROUP_S = 120.0
"""How long the checks of one group may take together."""

_CHECK = re.compile(r"^export async function (\w+)\(", re.M)
_NOT_CHECKS = {"runner", "support"}


def described() -> str:
    """Return what the Node SDK is tested as, for the report's header."""
    folder = os.environ.get(ENVIRON)
    if not folder:
        return WITHOUT
    found = [Path(folder, "node_modules", name, "package.json") for name in SDKS]
    versions = [json.loads(path.read_text())["version"] if path.is_file() else "missing" for path in found]
    return f"node sdk: {', '.join(versions)}"


def groups() -> Mapping[str, list[str]]:
    """Return the names of the checks by group, as the files say them."""
    files = {path.stem: path for path in sorted(CHECKS.glob("*.mjs")) if path.stem not in _NOT_CHECKS}
    return {name: _CHECK.findall(path.read_text()) for name, path in files.items()}


@dataclass(frozen=True)
class NodeSdk:
    """Node and the SDKs, and a folder to run checks in: they import what is beside them."""

    node: Path
    folder: Path

    @classmethod
    def found(cls, folder: Path) -> "NodeSdk":
        """Return it with the checks copied to `folder`; the test is skipped where there is none."""
        named = os.environ.get(ENVIRON)
        if not named:
            pytest.skip(WITHOUT)
        node, modules = Path(named, "node"), Path(named, "node_modules")
        missing = [str(path) for path in (node, *(modules / name for name in SDKS)) if not path.exists()]
        assert not missing, f"{ENVIRON} names a folder without {', '.join(missing)}"
        for path in CHECKS.glob("*.mjs"):
            shutil.copy(path, folder)
        (folder / "node_modules").symlink_to(modules.absolute())
        return cls(node.absolute(), folder)

    async def run(self, sdk: str, group: str, site: Mapping[str, Any]) -> Mapping[str, str | None]:
        """Return what each check of a group threw, or None; `site` is what they need to know of it.

        Raises:
            AssertionError: they have not all ended; it says what Node said instead.
        """
        with anyio.move_on_after(GROUP_S):
            done = await anyio.run_process(
                [str(self.node), "runner.mjs", sdk, group, json.dumps(site)],
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                check=False,
            )
            said = done.stdout.decode()
            assert done.returncode == 0, f"node: {done.returncode}\n{said}"
            answers = [json.loads(line) for line in said.splitlines()]
            return {answer["check"]: answer["error"] for answer in answers}
        raise AssertionError(f"the checks of {group} have not ended within {GROUP_S:g} s")
