"""The rules of the layout, read from the source: which way imports point, and how long a file may be."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("harness", "agents", "baselines", "kernel_candidates")
COMMAND_LINE = "harness.cli"

STAGES = frozenset(
    f"harness.{name}" for name in ("guard", "sandbox", "oracle", "numerics", "timing", "profiling", "decide", "keep")
)
"""What answers one question about a candidate or a program. Records, programs, arms and pure formulas are no stages."""

ALLOWED = {
    "agents": ("agents", "harness.brief", "harness.candidate", "harness.errors", "harness.program", "harness.schema"),
    "baselines": ("baselines", "harness.errors", "harness.program", "harness.workload"),
    "kernel_candidates": ("harness.candidate",),
}
FILE_LINES = {"harness": 345, "agents": 330, "baselines": 330, "kernel_candidates": 420}
FUNCTION_LINES = 50
ONE_FILE_BY_RULE = {"harness.schema": 450}
"""Every record that crosses a process or reaches disk stands in one file."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = frozenset(module_of(path) for package in PACKAGES for path in sources(package))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at whatever depth: a submodule by its full name where one is meant."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = names & MODULES
            yield from inner
            if names != inner:
                yield node.module


def broken(package: str, allowed: tuple[str, ...]) -> list[str]:
    return [
        f"{module_of(path)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name.partition(".")[0] in PACKAGES and not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)
    ]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_they_may(package: str) -> None:
    assert broken(package, ALLOWED[package]) == []


def test_only_the_command_line_knows_agents_baselines_and_candidates() -> None:
    assert [line for line in broken("harness", ("harness",)) if not line.startswith(f"{COMMAND_LINE} ")] == []


def test_a_stage_never_imports_another_stage() -> None:
    assert STAGES <= MODULES, f"no such stage: {sorted(STAGES - MODULES)}"
    found = [
        f"{module_of(path)} imports {name}"
        for path in sources("harness")
        for name in imports(path)
        if module_of(path) in STAGES and name in STAGES
    ]
    assert found == []


def test_only_the_worker_and_tools_beside_it_load_candidates_into_a_process() -> None:
    """Candidate code runs in the child: what the parent is made of never imports what calls `candidate.load`."""
    inside = {"harness.arms", "harness.worker", "harness.oracle", "harness.timing"}
    callers = {
        module_of(path)
        for path in sources("harness")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == "harness.candidate"
        and "load" in {a.name for a in node.names}
    }
    assert callers <= inside


def test_no_import_runs_in_a_circle() -> None:
    graph = {module_of(path): {n for n in imports(path) if n in MODULES} for p in PACKAGES for path in sources(p)}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for name in graph[module]:
                visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("package", PACKAGES)
def test_files_stay_short(package: str) -> None:
    long = {module_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources(package)}
    assert {n: lines for n, lines in long.items() if lines > ONE_FILE_BY_RULE.get(n, FILE_LINES[package])} == {}


@pytest.mark.parametrize("package", ["harness", "agents", "baselines"])
def test_functions_stay_short(package: str) -> None:
    long = {
        f"{module_of(path)}.{node.name}": node.end_lineno - node.body[0].lineno + 1
        for path in sources(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno
        and node.end_lineno - node.body[0].lineno >= FUNCTION_LINES
    }
    assert long == {}


def test_no_file_is_named_for_nothing() -> None:
    nameless = {"utils", "util", "common", "helpers", "misc"}
    assert [module for module in sorted(MODULES) if nameless & set(module.split("."))] == []


def test_dependencies_are_those_imported() -> None:
    """Each third-party import is declared, and each declared dependency is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], project["optional-dependencies"]["transformers"]]
    declared = {_normal(re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]) for lines in lists for line in lines}
    tops = {name.partition(".")[0] for package in PACKAGES for path in sources(package) for name in imports(path)}
    known = packages_distributions()
    outside = tops - set(sys.stdlib_module_names) - set(PACKAGES)
    used = {_normal(distribution) for top in outside for distribution in known.get(top, [top])}
    assert used - declared == set(), "imported but not declared"
    assert declared - used == set(), "declared but not imported"


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
