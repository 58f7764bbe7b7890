"""The architecture, enforced: a module imports only from lower floors or its own folder, and no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = "mfs_decompose"
ROOT = Path(__file__).parents[1] / PACKAGE

FLOORS = {
    "errors": 0, "units": 0, "events": 0, "provenance": 0,
    "recipe": 1,
    "source": 2, "linalg": 2,
    "codec": 3, "base_extraction": 3,
    "plan": 4,
    "artifact": 5,
    "pipeline": 6,
    "runtime": 6,
    "fidelity": 7,
    "api": 8, "demo": 8, "bench": 8,
    "cli": 9,
    "__main__": 10,
}  # fmt: skip
LONGEST_FILE = 400


@dataclass(frozen=True)
class Import:
    """`module` is imported on `line`; `eager` where that happens when the importing module is loaded."""

    module: str
    line: int
    eager: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def unit(self) -> str:
        """The folder or file right under the package; the ground-floor files count as one folder."""
        return self.name.split(".")[1] if "." in self.name else "__init__"

    @property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self, eager=True))


def modules_of(root: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def _imports(node: ast.AST, module: Module, *, eager: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module)
            yield from (Import(f"{base}.{alias.name}", child.lineno, eager) for alias in child.names)
        else:
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(child)
            yield from _imports(child, module, eager=eager and not lazy)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _resolve(name: str, modules: dict[str, Module]) -> str | None:
    """The module of the package that an imported name lives in; None outside the package."""
    if name.split(".")[0] != PACKAGE:
        return None
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def floor_violations(root: Path) -> list[str]:
    modules = modules_of(root)
    wrong = []
    for module in modules.values():
        if module.unit != "__init__" and module.unit not in FLOORS:
            wrong.append(f"{module.name}: {module.unit} has no floor")
            continue
        for imported in module.imports:
            target = _resolve(imported.module, modules)
            if target is None or imported.module == f"{PACKAGE}.__version__":
                continue
            if not _may_import(module, modules[target]):
                wrong.append(f"{module.name}:{imported.line} imports {imported.module}")
    return wrong


def _may_import(module: Module, target: Module) -> bool:
    if module.unit == "__init__":  # the public names: from anywhere but the command line
        return FLOORS.get(target.unit, 99) < FLOORS["cli"]
    if target.unit == "__init__" or target.unit not in FLOORS:
        return False
    here, there = FLOORS[module.unit], FLOORS[target.unit]
    return there < here or module.unit == target.unit or here == there == 0


def cycles(root: Path) -> list[list[str]]:
    """Groups of modules that need each other to load (Tarjan's strongly connected components)."""
    modules = modules_of(root)
    graph = {
        name: sorted({t for i in module.imports if i.eager and (t := _resolve(i.module, modules)) and t != name})
        for name, module in modules.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            cut = stack.index(name)
            groups.append(stack[cut:])
            del stack[cut:]

    for name in graph:
        if name not in index:
            visit(name)
    return [group for group in groups if len(group) > 1]


def belongs_to_cli(root: Path) -> list[str]:
    """Where typer is imported, or `print` called, outside cli/."""
    wrong = []
    for module in modules_of(root).values():
        if module.unit == "cli":
            continue
        wrong += [f"{module.name}:{i.line} imports typer" for i in module.imports if i.module.split(".")[0] == "typer"]
        wrong += [
            f"{module.name}:{node.lineno} prints"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
    return wrong


def test_every_import_goes_down() -> None:
    assert floor_violations(ROOT) == []


def test_no_module_needs_itself_to_load() -> None:
    assert cycles(ROOT) == []


def test_only_the_command_line_prints_and_knows_typer() -> None:
    assert belongs_to_cli(ROOT) == []


def test_no_file_is_too_long() -> None:
    lengths = {str(p): len(p.read_text(encoding="utf-8").splitlines()) for p in ROOT.rglob("*.py")}
    assert {path: n for path, n in lengths.items() if n > LONGEST_FILE} == {}


# The checks themselves, on planted packages.


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / PACKAGE
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("source/a.py", "import mfs_decompose.plan.b\n"),
        ("source/a.py", "from mfs_decompose.plan import b\n"),
        ("source/a.py", "from mfs_decompose.plan.b import x\n"),
        ("source/a.py", "from ..plan import b\n"),
        ("source/a.py", "from mfs_decompose import plan\n"),
        ("source/a.py", "def f():\n    from mfs_decompose.plan.b import x\n"),
        ("source/a.py", "class C:\n    def f(self):\n        import mfs_decompose.plan.b\n"),
        ("source/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mfs_decompose.plan.b\n"),
        ("source/a.py", "import mfs_decompose.linalg.c\n"),
        ("source/a.py", "from mfs_decompose import decompose\n"),
        ("codec/a.py", "import mfs_decompose.base_extraction\n"),
        ("errors.py", "import mfs_decompose.recipe.d\n"),
        ("__init__.py", "from mfs_decompose.cli.e import main\n"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    below = {"plan/b.py": "x = 1\n", "linalg/c.py": "", "recipe/d.py": "", "cli/e.py": "", "base_extraction.py": ""}
    wrong = floor_violations(plant(tmp_path, {**below, file: text}))
    assert len(wrong) == 1
    assert "imports mfs_decompose" in wrong[0]


def test_an_unknown_folder_is_found(tmp_path: Path) -> None:
    assert floor_violations(plant(tmp_path, {"utils/a.py": ""})) == [
        "mfs_decompose.utils: utils has no floor",
        "mfs_decompose.utils.a: utils has no floor",
    ]


def test_downward_and_own_folder_are_fine(tmp_path: Path) -> None:
    files = {
        "errors.py": "",
        "units.py": "from mfs_decompose.errors import x\n",
        "plan/a.py": "from . import b\nfrom mfs_decompose.units import y\nimport json, torch\n",
        "plan/b.py": "from mfs_decompose import __version__\n",
    }
    assert floor_violations(plant(tmp_path, files)) == []


def test_a_planted_cycle_is_found_and_a_lazy_one_is_not(tmp_path: Path) -> None:
    eager = {
        "plan/a.py": "from . import b\n",
        "plan/b.py": "import mfs_decompose.plan.c\n",
        "plan/c.py": "from .a import x\n",
    }
    names = [f"mfs_decompose.plan.{letter}" for letter in "abc"]
    assert [sorted(group) for group in cycles(plant(tmp_path / "eager", eager))] == [names]
    lazy = {**eager, "plan/c.py": "def f():\n    from .a import x\n"}
    assert cycles(plant(tmp_path / "lazy", lazy)) == []


def test_planted_printing_and_typer_are_found(tmp_path: Path) -> None:
    files = {"plan/a.py": "def f():\n    import typer\n    print(1)\n", "cli/b.py": "import typer\nprint(1)\n"}
    assert belongs_to_cli(plant(tmp_path, files)) == [
        "mfs_decompose.plan.a:2 imports typer",
        "mfs_decompose.plan.a:3 prints",
    ]
