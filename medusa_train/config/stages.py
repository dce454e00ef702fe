"""Recipes of stage two, and the stage-one run that they begin from."""

from __future__ import annotations

from pathlib import Path

import yaml

from medusa_train.config.catalog import MANIFEST, RECIPES, recipe_names
from medusa_train.config.load import diff_recipes, load_recipe
from medusa_train.config.recipe import HeadsOnly, Recipe


def missing_stage_one(recipe: Recipe) -> str | None:
    """The local folder `policy.init_from` where it holds no checkpoint yet; None where nothing is missing.

    A name that could be a hub id (`owner/name`) is left to the loader.
    """
    start = getattr(recipe.policy, "init_from", None)
    if start is None or (Path(start) / MANIFEST).is_file():
        return None
    local = Path(start).is_absolute() or start.startswith((".", "runs/")) or start.count("/") != 1
    return start if local else None


def stage_one_words(recipe: Recipe) -> list[str]:
    """Words after `fit` that train the heads which `recipe` begins from: a recipe of the package, and overrides.

    The package's recipe with that output_dir, else `medusa1.yaml`; base, data and heads are those of stage two, so
    that the heads fit it.
    """
    start = recipe.policy.init_from
    firsts = {name: load_recipe(RECIPES / name) for name in recipe_names()}
    firsts = {name: first for name, first in firsts.items() if isinstance(first.policy, HeadsOnly)}
    name = next((name for name, first in firsts.items() if first.output_dir == start), "medusa1.yaml")
    first, second = firsts[name].resolved(), recipe.resolved()
    words = []
    for section in ("base", "data", "heads"):
        for line in diff_recipes(first[section], second[section], f"{section}."):
            key = line.partition(":")[0]
            value = second
            for part in key.split("."):
                value = value[part]
            words.append(f"{key}={_flow(value)}")
    if first["output_dir"] != start:
        words.append(f"output_dir={_flow(start)}")
    return ["--recipe", name, *words]


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("...").strip()
