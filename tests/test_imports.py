"""The direction of imports that docs/architecture.md promises: a package uses only those above it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sdrseg"
FILES = sorted(SOURCE.rglob("*.py"))


def entries() -> list[list[str]]:
    """The packages of src/sdrseg/ in the order of docs/architecture.md; an entry of its list may name several files."""
    listed = (ROOT / "docs" / "architecture.md").read_text().partition("src/sdrseg/\n")[2].partition("\ntests/")[0]
    lines = [line[2:] for line in listed.splitlines() if re.match(r"  \w", line)]
    names = [re.match(r"((?:\w+(?:/|\.py) ?)+)", line) for line in lines]
    return [re.findall(r"\w+(?=/|\.py)", name[1]) for name in names if name]


POSITION = {package: position for position, packages in enumerate(entries()) for package in packages}
NARROW = {"kernels": {"compat", "errors", "labels"}, "losses": {"kernels", "labels", "variants"}}
"""Packages that may use even less than what is above them, and what they may use."""
LATE = [SOURCE / "scenario" / name for name in ("steps.py", "registry.py")]
"""Files with `Scenario.from_spec` and `known_source`, the exceptions that docs/architecture.md names."""


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(file: Path) -> set[str]:
    """The packages that a file imports, anywhere in it, also for types alone and with `import_module`."""
    return packages_in(file.read_text()) - {"__version__", package_of(file)}


def packages_in(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sdrseg":
            names = [node.module] if node.module != "sdrseg" else [f"sdrseg.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("sdrseg.")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            given = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            names = [name for name in given if isinstance(name, str) and name.startswith("sdrseg.")]
        else:
            continue
        found |= {name.split(".")[1] for name in names}
    return found


def test_imports_are_found():
    code = (
        "from sdrseg.a.b import c\nfrom sdrseg import d\nimport sdrseg.e.f\nimport_module('sdrseg.g')\n"
        "importlib.import_module('sdrseg.h.i')\nimport_module(j)\nimport numpy.k\nimport_module('torch.l')"
    )
    assert packages_in(code) == {"a", "d", "e", "g", "h"}


def test_the_list_names_every_package():
    found = {package_of(file) for file in FILES} - {"__init__", "__main__"}
    assert set(POSITION) == found


def test_a_scenario_is_imported_without_data_or_torch():
    """The files in LATE import `datasets` only when a function is called; no others may import from below."""
    code = "import sys, sdrseg.scenario; print(*({'torch', 'sdrseg.datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("package", POSITION)
def test_a_package_uses_only_those_above_it(package):
    for file in (file for file in FILES if package_of(file) == package):
        uses = imported(file)
        below = {used for used in uses if POSITION[used] > POSITION[package]}
        allowed = {"datasets"} if file in LATE else set()
        assert below == allowed, file
        assert uses <= NARROW.get(package, uses), file


PROMISED = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of Python's that begin with an underscore and are documented."""


def private_uses(code: str) -> Iterator[str]:
    """Names that begin with one underscore: imported from other libraries, or attributes of any object but `self`. And
    torch.ops.aten, whose functions are not documented."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("sdrseg"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        else:
            continue
        yield from (name for name in names if re.match(r"_[A-Za-z]|aten$", name) and name not in PROMISED)


def own_names(code: str) -> Iterator[str]:
    """Functions, and attributes that objects set."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_private_uses_are_found():
    code = "from a._b import c\nimport d._e\nf._g.h\nself._i\nfrom j import _K\nx.__doc__\nrow._asdict()\nt.aten.l()"
    assert sorted(private_uses(code)) == ["_K", "_b", "_e", "_g", "aten"]


def test_only_compat_reaches_into_private_parts():
    codes = {file.relative_to(SOURCE): file.read_text() for file in FILES if file.name != "compat.py"}
    ours = {name for code in codes.values() for name in own_names(code)}
    assert not {file: left for file, code in codes.items() if (left := set(private_uses(code)) - ours)}
