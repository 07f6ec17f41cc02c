"""What the package says of itself: every import of another distribution is declared, and the wheel holds all three rooms."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# import name: distribution, where they differ
DISTRIBUTIONS = {"yaml": "pyyaml", "megatron": "megatron-core", "vl_convert": "vl-convert-python", "PIL": "pillow"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in requirements}


def imports(path: Path) -> set[str]:
    """Top-level names of other distributions that a module imports when it runs, anywhere in it."""
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # for type checkers alone
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"r3"}


@pytest.mark.parametrize("room", ["r3", "rollout", "trainers"])
def test_every_import_is_of_a_declared_dependency(room: str) -> None:
    declared = names(PROJECT["dependencies"]).union(*map(names, PROJECT["optional-dependencies"].values()))
    for path in sorted((ROOT / room).rglob("*.py")):
        for name in imports(path):
            assert DISTRIBUTIONS.get(name, name) in declared, f"{path.relative_to(ROOT)} imports {name}"


def test_every_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT)
        for room in settings["package-dir"].values()
        for path in (ROOT / room).rglob("*.py")
    }
    as_packages = {str(folder).replace("/", ".") for folder in folders}
    listed = {re.sub(r"^r3\.(rollout|trainers)\b", r"\1", name) for name in settings["packages"]}
    assert listed == as_packages


def test_the_lock_names_no_local_build() -> None:
    lines = [line for line in (ROOT / "configs/cpu-stack.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    assert "torch==2.13.0" in lines
    assert not {"torchvision", "torchaudio", "torchcodec"} & names(lines)
