"""What the guard refuses, each with its line and what it says, and that it refuses no honest file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness import guard

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernel_candidates"
CATALOG = tomllib.loads((KERNELS / "catalog.toml").read_text(encoding="utf-8"))
HONEST = (
    *sorted(KERNELS / entry["file"] for entries in CATALOG.values() for entry in entries),
    *sorted((ROOT / "tests" / "judged").glob("[rw]*/*.py")),
    *sorted((ROOT / "tests" / "harness" / "candidates").glob("*.py")),
)
INTERPRETER = "a kernel does not reach into the interpreter"
WRITE_OUT = "a kernel needs no code made at run time and no files; write it out"
COMPILERS_ONLY = "subprocess runs compilers only, as a list that begins with one of"


def complaints(tmp_path: Path, source: str | bytes) -> list[str]:
    file = tmp_path / "candidate.py"
    file.write_bytes(source if isinstance(source, bytes) else source.encode())
    return [str(complaint) for complaint in guard.inspect(file)]


def test_there_are_candidates_to_read() -> None:
    assert len(HONEST) > 60
    assert all(path.is_file() for path in HONEST)


@pytest.mark.parametrize("path", HONEST, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_honest_file_is_refused(path: Path) -> None:
    assert guard.inspect(path) == []


@pytest.mark.parametrize("module", sorted(guard.IMPORTS - {"__future__", "harness.candidate"}))
def test_allowed_modules_are_allowed(tmp_path: Path, module: str) -> None:
    assert complaints(tmp_path, f"import {module}\n") == []


def test_a_candidates_own_imports_are_allowed(tmp_path: Path) -> None:
    source = "from __future__ import annotations\nfrom harness.candidate import Rewrite, Site, When\n"
    assert complaints(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import socket", "socket"),
        ("import math, sys", "sys"),
        ("import time", "time"),
        ("import importlib.util", "importlib.util"),
        ("import threading", "threading"),
        ("import multiprocessing.shared_memory as shared", "multiprocessing.shared_memory"),
        ("from builtins import print", "builtins"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("from . import other", "."),
        ("import harness", "harness"),
        ("from harness import timing", "harness"),
        ("from harness.timing import Timer", "harness.timing"),
        ("import harness.candidates", "harness.candidates"),
        ("import torchvision", "torchvision"),
        ("import baselines.beam.regions", "baselines.beam.regions"),
        ("def late():\n        import gc", "gc"),
    ],
)
def test_other_imports_are_refused(tmp_path: Path, source: str, module: str) -> None:
    line = 3 + source.count("\n")
    (found,) = complaints(tmp_path, f"import torch\n\n{source}\n")
    assert found.startswith(f"line {line}: import of {module}: a candidate imports __future__, array, ")
    assert "harness.candidate" in found


@pytest.mark.parametrize("name", sorted(guard.NAMES))
def test_names_are_refused_called_or_passed_on(tmp_path: Path, name: str) -> None:
    message = f"{name}: {WRITE_OUT}"
    assert complaints(tmp_path, f"\n{name}('x')\nother = [{name}]\n") == [f"line 2: {message}", f"line 3: {message}"]


@pytest.mark.parametrize("name", sorted(guard.ATTRIBUTES))
def test_attributes_are_refused_wherever_they_are_read_or_imported(tmp_path: Path, name: str) -> None:
    message = f"{name}: {guard.ATTRIBUTES[name]}"
    assert complaints(tmp_path, f"\nvalue.part.{name}(1)\n") == [f"line 2: {message}"]
    assert complaints(tmp_path, f"\n\nfrom torch import {name} as harmless\n") == [f"line 3: {message}"]


@pytest.mark.parametrize("name", "__class__ __dict__ __globals__ __code__ __subclasses__ __builtins__ __self__".split())
def test_attributes_of_the_interpreter_are_refused(tmp_path: Path, name: str) -> None:
    assert complaints(tmp_path, f"def run():\n    return run.{name}\n") == [f"line 2: {name}: {INTERPRETER}"]


@pytest.mark.parametrize("name", sorted(guard.DUNDERS))
def test_harmless_dunders_are_allowed(tmp_path: Path, name: str) -> None:
    assert complaints(tmp_path, f"value.{name}\n") == []


@pytest.mark.parametrize("name", "_exit remove execv setsid open putenv listdir nice setpriority".split())
def test_other_attributes_of_os_are_refused(tmp_path: Path, name: str) -> None:
    (found,) = complaints(tmp_path, f"import os\nos.{name}(0)\n")
    assert found.startswith(f"line 2: os.{name}: of os a candidate uses environ, fspath, ")


@pytest.mark.parametrize("name", sorted(guard.OS_ATTRIBUTES))
def test_what_a_build_needs_of_os_is_allowed(tmp_path: Path, name: str) -> None:
    assert complaints(tmp_path, f"import os\nos.{name}\n") == []


@pytest.mark.parametrize(
    "call",
    [
        "run(['curl', 'example.org'])",
        "run(['/usr/bin/g++'])",
        "run('g++ a.cpp', shell=True)",
        "run(['g++', 'a.cpp'], shell=True)",
        "run('g++')",
        "run(('g++', 'a.cpp'))",
        "run([])",
        "run([shell, 'g++'])",
        "run([*command])",
        "run(command)",
        "run()",
        "Popen(['bash'])",
        "check_output(['cat', 'x'])",
    ],
)
def test_subprocess_runs_compilers_only(tmp_path: Path, call: str) -> None:
    (found,) = complaints(tmp_path, f"import subprocess\n\nsubprocess.{call}\n")
    assert found.startswith(f"line 3: {COMPILERS_ONLY} ('g++', ")


@pytest.mark.parametrize("compiler", ["'g++'", "'gcc'", "'c++'", "'clang++'", "'nvcc'", "cxx", "CXX", "nvcc"])
def test_compilers_may_run(tmp_path: Path, compiler: str) -> None:
    source = f"import subprocess\nsubprocess.run([{compiler}, *flags, str(source)], check=True, capture_output=True)\n"
    assert complaints(tmp_path, source) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\ntorch.matmul = other", "line 2: assignment into module torch: a candidate patches nothing"),
        (
            "import torch as t\nt.backends.cuda.flag = 1",
            "line 2: assignment into module t: a candidate patches nothing",
        ),
        ("from torch import nn\nnn.x += 1", "line 2: assignment into module nn: a candidate patches nothing"),
        ("import os\nos.environ['X'] = '1'", "line 2: assignment into module os: a candidate patches nothing"),
        ("getattr(value, 'a' + 'b')", "line 1: getattr with a computed name: write the attribute out"),
        ("getattr(value)", "line 1: getattr with a computed name: write the attribute out"),
    ],
)
def test_patches_and_computed_names_are_refused(tmp_path: Path, source: str, said: str) -> None:
    assert complaints(tmp_path, source) == [said]


def test_a_constant_getattr_and_own_attributes_are_allowed(tmp_path: Path) -> None:
    assert complaints(tmp_path, "import torch\nkind = getattr(torch, 'bfloat16')\nstate.buffer = kind\n") == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"#" * (guard.MAX_BYTES + 1), "line 1: the file has 512,001 bytes; a candidate has at most 512,000"),
        (b"x = 1\ndef f(:\n", "line 2: not Python that can be read: invalid syntax"),
        (b"x = '\xff'", "line 1: not Python that can be read: 'utf-8' codec can't decode"),
        (b"x = 1\0", "line 1: not Python that can be read: source code string cannot contain null bytes"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "line 1: not Python that can be read: "),
        (b"x = " + b"-" * 20_000 + b"1", "line 1: not Python that can be read: "),
        (b"x" + b".a" * 900, "line 1: nested too deeply to be read"),
    ],
    ids=["too large", "syntax", "not UTF-8", "null byte", "parentheses", "minus signs", "attributes"],
)
def test_what_cannot_be_read_is_refused_with_one_complaint(tmp_path: Path, data: bytes, said: str) -> None:
    (found,) = complaints(tmp_path, data)
    assert found.startswith(said)


def test_the_largest_file_allowed_is_read(tmp_path: Path) -> None:
    assert complaints(tmp_path, b"#" * guard.MAX_BYTES) == []


def test_complaints_come_by_line(tmp_path: Path) -> None:
    source = "def f():\n    return eval\n\nimport socket\nx.system\n"
    assert [line.partition(":")[0] for line in complaints(tmp_path, source)] == ["line 2", "line 4", "line 5"]


@pytest.mark.parametrize(
    "source",
    [
        "import os as o\no.remove('x')",
        "from os import _exit",
        "from os import *",
        "import subprocess as sp\nsp.run(['curl'])",
        "from subprocess import run\nrun(['curl'])",
        "import subprocess\nrun = subprocess.run\nrun(['curl'])",
        "import subprocess\nsubprocess.run(['g++'], executable='/bin/sh')",
        "import subprocess\nsubprocess.run(['g++'], **{'shell': True})",
        "import torch\ngetattr(torch, 'set_num_threads')(4)",
        "getattr(value, '__class__')",
        "read = getattr\nread(value, 'a' + 'b')",
        "__builtins__['ev' + 'al']",
        "from harness.candidate import sys",
        "import harness.candidate as c\nc.sys.modules",
        "import torch.utils.cpp_extension",
        "from torch.utils.cpp_extension import load",
        "import torch.multiprocessing",
        "import torch\ntorch.matmul: object = other",
        "import torch\ntorch.matmul, torch.mm = other, other",
        "import torch\ndel torch.matmul",
        "import torch\nfor torch.matmul in other: pass",
        "from torch.nn import functional as F\nF.linear = other",
    ],
)
def test_other_spellings_of_what_is_refused_are_refused(tmp_path: Path, source: str) -> None:
    assert complaints(tmp_path, source)
