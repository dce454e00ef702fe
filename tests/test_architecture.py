"""The package's own rules, as data: who may import whom, how long a module may be, and what must not appear."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "medusa_train"
MODULES = sorted(PACKAGE.rglob("*.py"))
LEAVES = {"allocator", "errors", "console", "config", "provenance"}

# station -> the stations it may import at module level or inside functions (itself always).
ALLOWED = {
    "allocator": set(),
    "errors": set(),
    "console": {"errors"},
    "provenance": {"errors"},
    "config": {"errors", "console", "provenance"},
    "modeling": LEAVES,
    "dataset": LEAVES | {"modeling"},
    "checkpoint": LEAVES | {"dataset", "modeling"},
    "training": LEAVES | {"dataset", "modeling", "checkpoint"},
    "decoding": LEAVES | {"modeling"},
    "evaluation": LEAVES | {"dataset", "modeling", "checkpoint", "training", "decoding"},
    "cli": LEAVES | {"dataset", "modeling", "checkpoint", "training", "decoding", "evaluation"},
}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 75


def station(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_stations(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "medusa_train":
                names = [f"medusa_train.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "medusa_train" and len(parts) > 1 and parts[1] != "__version__":
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    name = station(path)
    if name in ("__init__", "__main__"):
        return
    assert name in ALLOWED, f"a station that the architecture does not know: {name}"
    forbidden = imported_stations(ast.parse(path.read_text())) - ALLOWED[name] - {name}
    assert not forbidden, f"{path.name} of {name} imports {sorted(forbidden)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_functions_fit_on_screens(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.body[0].lineno + 1  # a command's signature is its list of options
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def unsafe_calls(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("eval", "exec", "torch.save") or name.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib"):
            found.append(f"line {node.lineno}: {name}")
        found += [
            f"line {node.lineno}: {keyword.arg}=False"
            for keyword in node.keywords
            if keyword.arg in ("weights_only", "strict")
            and name != "zip"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
        ]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_unsafe_is_called(path: Path) -> None:
    assert unsafe_calls(ast.parse(path.read_text())) == []


def test_the_unsafe_check_finds_what_it_should() -> None:
    bad = (
        "torch.save(x, 'f'); model.load_state_dict(s, strict=False); torch.load(f, weights_only=False); pickle.loads(b)"
    )
    assert len(unsafe_calls(ast.parse(bad))) == 4


def test_importing_the_command_line_imports_no_torch() -> None:
    code = (
        "import sys; from medusa_train.cli.app import build_app; build_app(); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'peft') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
