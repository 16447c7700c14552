"""What the five packages promise each other: one version, exact pins, one direction of imports, one namespace."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "sharding": set(),
    "kernels": {"sharding"},
    "core": {"sharding", "kernels"},
    "offload": {"sharding", "core"},
    "models": {"sharding", "kernels", "core", "offload"},
}
MODULE_OF = {"numba-cuda": "numba"}  # distributions whose module has another name
PROJECTS = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"] for name in MAY_IMPORT
}
VERSION = PROJECTS["core"]["version"]

each_package = pytest.mark.parametrize("name", MAY_IMPORT)


def source(name: str) -> Path:
    return ROOT / "packages" / name / "src" / "megalith" / name


def requirements(name: str) -> list[str]:
    extras = PROJECTS[name].get("optional-dependencies", {})
    return [*PROJECTS[name]["dependencies"], *(line for lines in extras.values() for line in lines)]


def distribution(requirement: str) -> str:
    """The name in a requirement: `numba-cuda` in `numba-cuda>=0.30`."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return name.group()


def imported_modules(text: str, package: str) -> Iterator[tuple[int, str]]:
    """Each absolute module that a source text imports, with its line; `from megalith import x` is `megalith.x`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            if node.module == "megalith":
                yield from ((node.lineno, f"megalith.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            yield node.lineno, ".".join([*base, node.module] if node.module else base)


def imports_of(name: str) -> Iterator[tuple[str, str]]:
    """Each module that a package imports, with the place: ("packages/core/.../trace.py:12", "megalith.sharding")."""
    for path in sorted(source(name).rglob("*.py")):
        package = ".".join(path.relative_to(source(name).parents[1]).parent.parts)
        for line, module in imported_modules(path.read_text(), package):
            yield f"{path.relative_to(ROOT)}:{line}", module


def test_the_packages_are_these_five() -> None:
    assert {path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")} == set(MAY_IMPORT)
    assert all(PROJECTS[name]["name"] == f"megalith-{name}" for name in MAY_IMPORT)


@each_package
def test_versions_agree(name: str) -> None:
    text = (source(name) / "__init__.py").read_text()
    assert PROJECTS[name]["version"] == VERSION
    assert re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE) == [VERSION]


@each_package
def test_installed_version_is_this_one(name: str) -> None:
    try:
        installed = metadata.version(f"megalith-{name}")
    except metadata.PackageNotFoundError:
        pytest.skip(f"megalith-{name} runs from its sources here, it is not installed")
    assert installed == VERSION


@each_package
def test_siblings_are_pinned_and_follow_the_arrows(name: str) -> None:
    siblings = {line for line in PROJECTS[name]["dependencies"] if distribution(line).startswith("megalith-")}
    assert siblings == {f"megalith-{sibling}=={VERSION}" for sibling in MAY_IMPORT[name]}


@each_package
def test_python_license_and_typing_are_declared(name: str) -> None:
    assert PROJECTS[name]["requires-python"] == ">=3.11"
    assert PROJECTS[name]["license"] == "Apache-2.0"
    assert (ROOT / "packages" / name / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (source(name) / "py.typed").is_file()


@each_package
def test_megalith_is_a_namespace(name: str) -> None:
    beside = {path.name for path in source(name).parent.iterdir()} - {"__pycache__"}
    assert beside == {name}, f"packages/{name}/src/megalith may hold only the folder {name}"


@each_package
def test_torch_has_a_floor_and_no_cap(name: str) -> None:
    assert [line for line in requirements(name) if distribution(line) == "torch"] in ([], ["torch>=2.11"])


@each_package
def test_imports_follow_the_arrows(name: str) -> None:
    allowed = {f"megalith.{sibling}" for sibling in MAY_IMPORT[name] | {name}}
    wrong = [
        f"{place} imports {module}"
        for place, module in imports_of(name)
        if module.split(".")[0] == "megalith" and ".".join(module.split(".")[:2]) not in allowed
    ]
    assert not wrong, f"megalith.{name} may import only {sorted(allowed)}:\n" + "\n".join(wrong)


@each_package
def test_third_party_imports_are_declared(name: str) -> None:
    declared = {MODULE_OF.get(dist, dist.replace("-", "_")) for dist in map(distribution, requirements(name))}
    wrong = [
        f"{place} imports {module}"
        for place, module in imports_of(name)
        if module.split(".")[0] not in declared | sys.stdlib_module_names | {"megalith"}
    ]
    assert not wrong, f"packages/{name}/pyproject.toml declares no such dependency or extra:\n" + "\n".join(wrong)


def test_imports_are_seen_in_every_form() -> None:
    text = """
import torch.fx, megalith.core as mc
from megalith import models
from megalith.sharding.rule import Rule
from . import mesh
from .aten import tables
from ..core import shard
def f():
    if True:
        from megalith.offload import store
"""
    assert list(imported_modules(text, "megalith.sharding")) == [
        (2, "torch.fx"),
        (2, "megalith.core"),
        (3, "megalith.models"),
        (4, "megalith.sharding.rule"),
        (5, "megalith.sharding"),
        (6, "megalith.sharding.aten"),
        (7, "megalith.core"),
        (10, "megalith.offload"),
    ]
