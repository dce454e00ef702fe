"""Broken copies of medusa_train.decoding: one change of the source each, imported beside the real package."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import medusa_train.decoding

SOURCE = Path(medusa_train.decoding.__file__).parent
MODULES = (
    "cache",
    "calibrate",
    "decode",
    "masks",
    "propose",
    "ranks",
    "replay",
    "rounds",
    "search",
    "settings",
    "tree",
    "verify",
)


def real_package() -> SimpleNamespace:
    """The modules of the real package by name."""
    return _modules("medusa_train.decoding")


def mutant(folder: Path, name: str, module: str, old: str, new: str) -> SimpleNamespace:
    """The modules of a copy in which `old` (which must be there exactly once) became `new`.

    Args:
        folder: an empty folder for the copy; put on sys.path by the caller's fixture.
        name: package name of the copy.
    """
    target = folder / name
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / f"{module}.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{module}.py holds {text.count(old)} of {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    for file in target.glob("*.py"):
        file.write_text(file.read_text(encoding="utf-8").replace("medusa_train.decoding", name), encoding="utf-8")
    importlib.invalidate_caches()
    return _modules(name)


def forget(name: str) -> None:
    """Drops the copy from sys.modules."""
    for module in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
        del sys.modules[module]


def _modules(package: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: importlib.import_module(f"{package}.{name}") for name in MODULES})
