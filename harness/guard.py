"""Refuses sources that try what no kernel needs, by reading their syntax tree; nothing of the file is run.

A refusal names the line and says what to do instead.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 512_000
IMPORTS = frozenset(
    "__future__ array collections contextlib ctypes dataclasses enum functools hashlib itertools math numpy operator "
    "os pathlib shutil struct subprocess tempfile textwrap torch triton typing harness.candidate".split()
)
NAMES = frozenset("eval exec compile __import__ globals locals vars breakpoint input open setattr delattr".split())
ATTRIBUTES = {
    "elapsed_time": "a candidate does not time itself",
    "perf_counter": "a candidate does not time itself",
    "set_float32_matmul_precision": "precision flags are global and would move the reference too",
    "allow_tf32": "precision flags are global and would move the reference too",
    "set_num_threads": "threads are the harness's to set",
    "set_num_interop_threads": "threads are the harness's to set",
    "load_inline": "torch's extension builder takes a minute; build a plain C ABI shared object with g++ or nvcc",
    "cpp_extension": "torch's extension builder takes a minute; build a plain C ABI shared object with g++ or nvcc",
    "multiprocessing": "a candidate starts no processes but a compiler",
    "_getframe": "a kernel does not read its callers",
    "system": "use subprocess.run on a compiler",
    "popen": "use subprocess.run on a compiler",
    "fork": "a candidate starts no processes but a compiler",
    "kill": "a candidate sends no signals",
    "sched_setaffinity": "cores are the harness's to set",
    "Thread": "work started on a thread outlives the clock; launch on the current stream and return when it is queued",
    "Stream": "join a side stream before you return; a first form should use the current one",
}
OS_ATTRIBUTES = frozenset("environ path makedirs fspath sep getpid".split())
COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "nvcc", "CXX", "CC", "NVCC")
SUBPROCESS_VALUES = frozenset("CalledProcessError CompletedProcess DEVNULL PIPE STDOUT TimeoutExpired".split())
WHOLE = ("os", "subprocess")
CANDIDATE = ("Rewrite", "Site", "When")
DUNDERS = frozenset("__init__ __name__ __doc__ __file__ __post_init__ __call__ __enter__ __exit__".split())


@dataclass(frozen=True)
class Complaint:
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def inspect(path: Path) -> list[Complaint]:
    """Complaints about a candidate's source, none for an honest one; a file that is no Python gives one too."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        return [Complaint(1, f"the file has {len(data):,} bytes; a candidate has at most {MAX_BYTES:,}")]
    try:
        tree = ast.parse(data.decode("utf-8"), path.name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Complaint(getattr(error, "lineno", None) or 1, f"not Python that can be read: {error}")]
    reader = _Reader()
    try:
        reader.visit(tree)
    except RecursionError:
        return [Complaint(1, "nested too deeply to be read")]
    return sorted(reader.complaints, key=lambda complaint: complaint.line)


class _Reader(ast.NodeVisitor):
    """Collects complaints; knows which names are imported modules."""

    def __init__(self) -> None:
        self.complaints: list[Complaint] = []
        self.modules: set[str] = set()
        self.called: set[ast.expr] = set()

    def complain(self, node: ast.AST, message: str) -> None:
        self.complaints.append(Complaint(getattr(node, "lineno", 1), message))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(node, alias.name)
            self.modules.add(alias.asname or alias.name.split(".")[0])
            if alias.asname and alias.name in WHOLE:
                self.complain(node, f"{alias.name} under another name: import it as it is")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imported(node, node.module or ".")
        self.modules.update(alias.asname or alias.name for alias in node.names if alias.name.islower())
        if node.module in WHOLE:
            self.complain(node, f"names from {node.module}: import {node.module} and write them out")
        for alias in node.names if node.module == "harness.candidate" else ():
            if alias.name not in CANDIDATE:
                self.complain(node, f"harness.candidate.{alias.name}: a candidate imports {', '.join(CANDIDATE)}")
        for alias in node.names:
            self._attribute(node, alias.name)

    def _imported(self, node: ast.AST, name: str) -> None:
        for part in name.split(".")[1:]:
            self._attribute(node, part)
        if name == "harness.candidate" and isinstance(node, ast.Import):
            self.complain(
                node, f"harness.candidate as a module: write from harness.candidate import {', '.join(CANDIDATE)}"
            )
        if name not in IMPORTS and name.split(".")[0] not in IMPORTS:
            self.complain(node, f"import of {name}: a candidate imports {', '.join(sorted(IMPORTS))}")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id.startswith("__") and node.id not in DUNDERS | NAMES:
            self.complain(node, f"{node.id}: a kernel does not reach into the interpreter")
        if node.id == "getattr" and node not in self.called:
            self.complain(node, "getattr passed on: write the attribute out")
        if node.id in NAMES:
            self.complain(node, f"{node.id}: a kernel needs no code made at run time and no files; write it out")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node, node.attr)
        if not isinstance(node.ctx, ast.Load):
            self._target(node)
        module = node.value.id if isinstance(node.value, ast.Name) else ""
        if module == "subprocess" and node not in self.called and node.attr not in SUBPROCESS_VALUES:
            self.complain(node, f"subprocess.{node.attr} passed on: call it on a compiler")
        if module == "os" and node.attr not in OS_ATTRIBUTES:
            self.complain(node, f"os.{node.attr}: of os a candidate uses {', '.join(sorted(OS_ATTRIBUTES))}")
        self.generic_visit(node)

    def _attribute(self, node: ast.AST, name: str) -> None:
        if name in ATTRIBUTES:
            self.complain(node, f"{name}: {ATTRIBUTES[name]}")
        if (
            name.startswith("__")
            and name.endswith("__")
            and name not in DUNDERS
            and not isinstance(node, ast.ImportFrom)
        ):
            self.complain(node, f"{name}: a kernel does not reach into the interpreter")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._target(node)
        self.generic_visit(node)

    def _target(self, target: ast.expr) -> None:
        root: ast.expr = target
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if root is not target and isinstance(root, ast.Name) and root.id in self.modules:
            self.complain(target, f"assignment into module {root.id}: a candidate patches nothing")

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        self.called.add(function)
        if isinstance(function, ast.Name) and function.id == "getattr" and _constant(node.args[1:2]):
            self._attribute(node, str(node.args[1].value))  # type: ignore[attr-defined]
        if isinstance(function, ast.Name) and function.id == "getattr" and not _constant(node.args[1:2]):
            self.complain(node, "getattr with a computed name: write the attribute out")
        if _is_subprocess(function) and not self._compiles(node):
            self.complain(node, f"subprocess runs compilers only, as a list that begins with one of {COMPILERS[:6]}")
        self.generic_visit(node)

    def _compiles(self, node: ast.Call) -> bool:
        if not node.args or any(keyword.arg in (None, "shell", "executable") for keyword in node.keywords):
            return False
        command = node.args[0]
        if isinstance(command, ast.List) and command.elts:
            first = command.elts[0]
            return (isinstance(first, ast.Constant) and first.value in COMPILERS) or (
                isinstance(first, ast.Name) and first.id.upper() in COMPILERS
            )
        return False


def _is_subprocess(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "subprocess"
    )


def _constant(nodes: list[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant)
