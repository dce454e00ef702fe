"""What ships in the package (recipes, prompts) and where commands put and look for things when nobody says."""

from __future__ import annotations

from pathlib import Path

from medusa_train.config.bases import BASES
from medusa_train.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parent.parent
RECIPES, PROMPTS = PACKAGE / "recipes", PACKAGE / "prompts"
RUNS = Path("runs")
TRAIN_PROMPTS, HELDOUT_PROMPTS = PROMPTS / "train.jsonl", PROMPTS / "heldout.jsonl"
DEFAULT_SYNTHESIZED = 1000
MANIFEST = "medusa_manifest.json"


def recipe_names() -> list[str]:
    """File names of the recipes in the package, sorted."""
    return sorted(path.name for path in RECIPES.glob("*.yaml"))


def recipe_path(name: str | Path) -> Path:
    """The file that `name` means: a path as it is, else a recipe of the package (`medusa2`, `medusa2.yaml`).

    `recipes/medusa2.yaml`, as the documentation writes it, works from any folder too.

    Raises:
        UserError: neither a file nor a recipe of the package.
    """
    path = Path(name)
    if path.exists():
        return path
    if path.parent in (Path("."), Path("recipes")):
        bundled = RECIPES / (path.name if path.suffix else f"{path.name}.yaml")
        if bundled.is_file():
            return bundled
    here = sorted(item.name for item in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    known = [*here, *(entry for entry in recipe_names() if entry not in here)]
    guess = nearest(path.name, known)
    raise UserError(
        "no such recipe",
        where=str(name),
        allowed="a path, or one of " + ", ".join(known),
        fix=None if guess is None else f"did you mean {guess}?",
    )


def bundled_json(name: str) -> Path | None:
    """A DeepSpeed config of the package by name or `recipes/NAME`; None where there is a file of that path, or none."""
    path = Path(name)
    bundled = RECIPES / path.name
    found = not path.exists() and path.parent in (Path("."), Path("recipes")) and bundled.is_file()
    return bundled if found else None


def distill_folder(base: str) -> str:
    """Where `distill` writes and recipes read: runs/BASE/distill; BASE is an alias, or the end of a path or hub id."""
    aliases = {alias.repo_id: name for name, alias in BASES.items()}
    name = aliases.get(base, base.rstrip("/").rsplit("/", 1)[-1])
    if name in ("", ".", ".."):
        name = Path(base).resolve().name
    return str(RUNS / name / "distill")


def newest_checkpoint(root: Path = RUNS) -> Path:
    """The checkpoint under `root` whose manifest was written last.

    Raises:
        UserError: there is none.
    """
    # Folders that begin with a dot are half-written or set aside.
    found = [
        path for path in root.rglob(MANIFEST) if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not found:
        raise UserError(
            "no checkpoint was named, and there is none to take by default",
            where=f"{root}/",
            fix="name one: medusa-train eval-acceptance CHECKPOINT; or train one: medusa-train fit --recipe RECIPE",
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent
