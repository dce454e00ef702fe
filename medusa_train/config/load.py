"""Reading recipes: YAML, overrides, old names, and errors that say where and what would have been right."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from medusa_train.config.catalog import bundled_json, recipe_path
from medusa_train.config.recipe import HeadsOnly, Joint, Recipe, SelfDistill
from medusa_train.console import say
from medusa_train.errors import UserError, unknown_name

POLICIES = {"heads_only": HeadsOnly, "joint": Joint, "self_distill": SelfDistill}

# Names that transformers removed, and what says the same today. A value of None: the name has no meaning any more.
TRAINING_ALIASES: dict[str, str | None] = {
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "group_by_length": None,
    "overwrite_output_dir": None,
    "save_safetensors": None,
    "logging_dir": None,
}
# Decided by other parts of the recipe or by the program; a second place to say them would be a second truth.
TRAINING_RESERVED = {
    "output_dir": "output_dir at the top of the recipe",
    "load_best_model_at_end": "evaluation.keep_best",
    "metric_for_best_model": "evaluation.metric",
    "greater_is_better": "evaluation.metric",
    "remove_unused_columns": "nothing: rows have no unused columns",
    "label_names": "nothing: labels are made from the rows",
    "average_tokens_across_devices": "nothing: counts are always summed over ranks",
}
# The flat keys of the axolotl fork that the Medusa paper's authors trained with.
FLAT_ALIASES = {
    "base_model": "base.name",
    "medusa_num_heads": "heads.medusa_num_heads",
    "medusa_num_layers": "heads.medusa_num_layers",
    "medusa_heads_coefficient": "policy.medusa_weight",
    "medusa_lr_multiplier": "policy.head_lr_multiplier",
    "medusa_scheduler": "policy.ramp.shape",
    "sequence_len": "data.max_length",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, applies `section.key=value` overrides, and validates it strictly.

    Raises:
        UserError: no such file, broken YAML (with line), an unknown key (with the nearest name), a wrong value.
    """
    path = recipe_path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe: {error}", where=str(path)) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise UserError(f"not YAML: {getattr(error, 'problem', error)}", where=where) from None
    if not isinstance(data, dict):
        raise UserError("a recipe is a mapping of sections", where=str(path), allowed=", ".join(Recipe.model_fields))
    data = _rename_flat(data)
    for override in overrides:
        apply_override(data, override)
    return parse_recipe(data, where=str(path))


def parse_recipe(data: dict[str, Any], where: str = "recipe") -> Recipe:
    """Validates plain data as a recipe; errors name the key and what is allowed."""
    data = dict(data)
    policy = data.get("policy")
    if isinstance(policy, str):
        data["policy"] = {"kind": policy}
    _check_names(data, Recipe, where)
    if isinstance(data.get("training"), dict):
        data["training"] = _training_names(data["training"], where)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(error, where) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` reads it back to the same recipe."""
    return yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)


def apply_override(data: dict[str, Any], override: str) -> None:
    """Sets one `section.key=value`; the value is YAML, so `1e-3`, `true`, `[1, 2]` and `null` mean what they say."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(f"{override!r} is no override", allowed="section.key=value, e.g. training.learning_rate=1e-3")
    if name.startswith("-"):
        raise UserError(f"unknown option {name!r}", fix="overrides have no dashes: section.key=value")
    try:
        value = _number(yaml.safe_load(text))
    except yaml.YAMLError:
        raise UserError(f"the value of {name} is not YAML: {text!r}") from None
    *parents, last = FLAT_ALIASES.get(name, name).split(".")
    node: Any = data
    for parent in parents:
        if isinstance(node.get(parent), str) and parent == "policy":
            node[parent] = {"kind": node[parent]}
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"{name}: {parent} is no section", where=override)
    node[last] = value


def diff_recipes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: old -> new` for every leaf in which two resolved recipes differ."""
    lines = []
    for key in sorted({*old, *new}):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += diff_recipes(left, right, f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {left!r} -> {right!r}")
    return lines


def _number(value: Any) -> Any:
    # YAML 1.1 reads `1e-3` as text because it has no dot; everybody who types it means a number.
    if isinstance(value, str):
        try:
            return float(value) if any(ch.isdigit() for ch in value) else value
        except ValueError:
            return value
    return value


def _rename_flat(data: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in data.items() if key not in FLAT_ALIASES}
    for old in data.keys() & FLAT_ALIASES.keys():
        new = FLAT_ALIASES[old]
        say(f"note: {old} is an old name of {new}")
        apply_override(
            result, f"{new}={yaml.safe_dump(data[old], default_flow_style=True).removesuffix('...').strip()}"
        )
    return result


def _section_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The model class that `value` will be read as, so that unknown keys can be named before pydantic runs."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if {HeadsOnly, Joint, SelfDistill} & set(options):
            return POLICIES.get(value.get("kind", ""))
        return options[0] if options else None
    return None


def _check_names(data: dict[str, Any], section: type[BaseModel], where: str, prefix: str = "") -> None:
    if section in POLICIES.values():
        _check_policy(data, where)
    for key, value in data.items():
        if key not in section.model_fields:
            raise unknown_name("recipe key", f"{prefix}{key}", [f"{prefix}{f}" for f in section.model_fields], where)
        if key == "policy" and isinstance(value, dict) and value.get("kind") not in POLICIES:
            raise unknown_name("policy", str(value.get("kind")), POLICIES, f"{where}: policy.kind")
        if isinstance(value, dict):
            inner = _section_of(section.model_fields[key].annotation, value)
            if inner is not None:
                _check_names(value, inner, where, f"{prefix}{key}.")


def _check_policy(data: dict[str, Any], where: str) -> None:
    """Says of a field that another policy has, that it does not apply here."""
    kind = data.get("kind")
    for key in data:
        owners = [name for name, policy in POLICIES.items() if key in policy.model_fields]
        if owners and kind not in owners:
            raise UserError(
                f"policy.{key} does not apply to {kind}; it belongs to {', '.join(owners)}",
                where=where,
                allowed=", ".join(POLICIES[kind].model_fields) if kind in POLICIES else None,
            )


@functools.cache
def training_argument_names() -> frozenset[str]:
    """The names of transformers' TrainingArguments (imports transformers)."""
    import dataclasses

    from transformers import TrainingArguments

    return frozenset(field.name for field in dataclasses.fields(TrainingArguments) if field.init)


def _training_names(training: dict[str, Any], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    allowed = training_argument_names() - TRAINING_RESERVED.keys()
    for key, value in training.items():
        if key in TRAINING_ALIASES and key not in allowed:
            new = TRAINING_ALIASES[key]
            say(f"note: training.{key} " + ("has no effect any more" if new is None else f"is called {new} now"))
            if new is None:
                continue
            key = new
        if key in TRAINING_RESERVED:
            raise UserError(f"training.{key} cannot be set here", where=where, fix=f"use {TRAINING_RESERVED[key]}")
        if key not in allowed:
            raise unknown_training_name(key, allowed, where)
        # YAML reads a bare `no` as false; the library's strategies are called "no".
        if key == "deepspeed" and isinstance(value, str) and (bundled := bundled_json(value)) is not None:
            value = yaml.safe_load(bundled.read_text())
        result[key] = "no" if value is False and key.endswith("_strategy") else _number(value)
    return result


def unknown_training_name(key: str, allowed: frozenset[str], where: str) -> UserError:
    """The error for a `training:` name that transformers does not have (its list is too long to print)."""
    error = unknown_name("recipe key", f"training.{key}", [f"training.{name}" for name in allowed], where)
    return UserError(error.what, where=where, allowed="the names of transformers.TrainingArguments", fix=error.fix)


def _explain(error: ValidationError, where: str) -> UserError:
    problems = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"] if part not in POLICIES)
        message = item["msg"].removeprefix("Value error, ")
        given = item.get("input")
        shown = "" if isinstance(given, dict | list) or item["type"] == "missing" else f" (given: {given!r})"
        problems.append(f"{place}: {message}{shown}" if place else message)
    return UserError("; ".join(problems), where=where)
