"""The model card of a checkpoint: what it is, what it was trained on, what it won, how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.manifest import HeadsManifest
from medusa_train.console import human_bytes
from medusa_train.errors import UserError

_REPORT_KIND = "medusa-train.acceptance"
_CONTRACT_WORDS = {
    "own": "each head has a projection of its own over the whole vocabulary",
    "shared": "the heads use the base's lm_head",
    "reduced": "each head has a projection of its own over the most frequent tokens",
}


def find_report(checkpoint: Path) -> Path | None:
    """The acceptance report that lies in or beside a checkpoint, or None."""
    checkpoint = checkpoint.resolve()
    places = (
        checkpoint / "report.json",
        checkpoint.parent / f"{checkpoint.name}-report" / "report.json",
        checkpoint / "report" / "report.json",
        checkpoint.parent / "report" / "report.json",
    )
    return next((place for place in places if place.is_file()), None)


def read_report(path: Path) -> dict[str, Any]:
    """An acceptance report as plain data.

    Raises:
        UserError: unreadable, or no acceptance report.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the report cannot be read ({error})", where=str(path)) from error
    if not isinstance(content, dict) or content.get("kind") != _REPORT_KIND:
        raise UserError("not an acceptance report", where=str(path), fix="name the report.json of `eval-acceptance`")
    return content


def render_card(
    manifest: HeadsManifest,
    *,
    form: str,
    report: dict[str, Any] | None,
    heads_bytes: int,
    repo_id: str | None = None,
    changed: str | None = None,
) -> str:
    """The README.md of a checkpoint or an export, with the hub's front matter.

    Args:
        changed: "merged" or "adapter" where the export carries the changed backbone so; else as the checkpoint does.
    """
    if changed in ("merged", "adapter"):
        manifest = manifest.model_copy(update={"backbone": manifest.backbone.model_copy(update={"changed": changed})})
    base = manifest.backbone.name
    on_hub = _is_hub_id(base)
    front: dict[str, Any] = {
        "library_name": "medusa-train",
        "tags": ["medusa", "speculative-decoding", "medusa-train", f"medusa-{manifest.head_contract}"],
        "pipeline_tag": "text-generation",
    }
    if on_hub:
        front |= {"base_model": base, "base_model_relation": "adapter"}
    shown = base if on_hub else Path(base).name
    parts = [
        "---\n" + yaml.safe_dump(front, sort_keys=False) + "---\n",
        f"# Medusa heads for {shown}\n",
        f"{manifest.medusa_num_heads} heads of {manifest.medusa_num_layers} layer(s), "
        f"contract `{manifest.head_contract}`: "
        f"{_CONTRACT_WORDS[manifest.head_contract]}. {human_bytes(heads_bytes)} in {manifest.dtype}. "
        "Head j guesses the token j + 2 places ahead; the base verifies the guesses in one forward pass.\n",
        _facts(manifest, shown),
        _acceptance(report, manifest),
        _loading(form, manifest, repo_id),
        "## Recipe\n\n```yaml\n"
        + yaml.safe_dump(_public(manifest.recipe), sort_keys=False, allow_unicode=True)
        + "```\n",
    ]
    return "\n".join(part for part in parts if part)


def _facts(manifest: HeadsManifest, shown: str) -> str:
    entry = manifest.backbone
    changed = {
        "none": "unchanged (Medusa-1): every tensor is bit-identical to the base",
        "adapter": f"changed by the adapter in `{abi.ADAPTER_FOLDER}/`, which must be loaded with the heads",
        "merged": f"changed; it lies whole in `{abi.BACKBONE_FOLDER}/` and replaces the base",
    }[entry.changed]
    rows = {
        "Base": f"{shown}" + (f", revision `{entry.revision}`" if entry.revision else ""),
        "Backbone": changed,
        "Base fingerprint": f"`{entry.fingerprint}`",
        "Chat template": f"`{entry.chat_template_hash}`",
        "Policy": manifest.policy,
        "Training data manifest": f"`{manifest.data_manifest_hash}`" if manifest.data_manifest_hash else "none",
        "Predicts token t +": ", ".join(map(str, manifest.offsets)),
        "Written": manifest.created,
        "Versions": ", ".join(f"{name} {version}" for name, version in manifest.library_versions.items()),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "| | |\n|---|---|\n" + "\n".join(lines) + "\n"


def _acceptance(report: dict[str, Any] | None, manifest: HeadsManifest) -> str:
    if report is None:
        return "## Acceptance\n\nNot measured yet: `medusa-train eval-acceptance` writes a report.\n"
    lines = ["## Acceptance\n"]
    suite, setup = report.get("suite", {}), report.get("setup", {})
    lines.append(
        f"{suite.get('used')} prompts of {suite.get('name')}, {setup.get('max_new_tokens')} tokens at most, "
        f"{setup.get('dtype')} on {setup.get('device')}; 95 % intervals over prompts; tokens per round with the root.\n"
    )
    if setup.get("base_fingerprint") not in (None, manifest.backbone.fingerprint, manifest.backbone.merged_fingerprint):
        lines.append("**These figures were measured on another backbone than the heads were trained for.**\n")
    lines += [
        "| arm | tree nodes | tokens per round | speed against plain decoding | same text |",
        "|---|---|---|---|---|",
    ]
    for arm in report.get("arms", []):
        speed = arm.get("speed") or {}
        exact = arm.get("exactness", {})
        same = f"{exact.get('identical')} of {exact.get('prompts')}" if exact.get("checked") else "not promised"
        lines.append(
            f"| {arm.get('name')} ({arm.get('mode')}) | {arm.get('tree', {}).get('nodes')} | "
            f"{_estimate(arm.get('tokens_per_round'))} | {_estimate(speed.get('measured_speedup'), 'x')} | {same} |"
        )
    for arm in report.get("arms", [])[:1]:
        ranks = ["| head | predicts | rank 1 | rank 2 | rank 3 |", "|---|---|---|---|---|"]
        for head in arm.get("head_accuracy", []):
            shares = [f"{100 * value:.1f} %" if value is not None else "-" for value in head.get("accuracy", [])[:3]]
            ranks.append(f"| {head.get('head')} | t + {head.get('offset')} | " + " | ".join(shares) + " |")
        lines += ["\nHow often the true token stood at each head's rank:\n", *ranks]
    return "\n".join(lines) + "\n"


def _estimate(value: dict[str, Any] | None, unit: str = "") -> str:
    if not value or value.get("value") is None:
        return "-"
    text = f"{value['value']:.2f}{unit}"
    if value.get("low") is not None and value.get("high") is not None:
        text += f" ({value['low']:.2f} - {value['high']:.2f})"
    return text


def _loading(form: str, manifest: HeadsManifest, repo_id: str | None) -> str:
    where, base = repo_id or "FOLDER", manifest.backbone.name if _is_hub_id(manifest.backbone.name) else "BASE"
    if manifest.backbone.changed == "merged":
        base = f"{where}/{abi.BACKBONE_FOLDER}"
    heads = manifest.medusa_num_heads
    vllm = (
        "```python\nfrom vllm import LLM  # 0.25 to 0.32; later versions have no Medusa\n\n"
        f'llm = LLM(model="{base}", speculative_config={{"method": "medusa", "model": "{where}", '
        f'"num_speculative_tokens": {heads}}})\n```\n'
    )
    text = {
        "medusa": f'```bash\nmedusa-train generate {where} --prompt "..."\nmedusa-train doctor {where}\n```\n\n'
        "```python\nfrom medusa_train.checkpoint import load_with_base\n\n"
        f'base, checkpoint = load_with_base("{where}")  # refuses any other backbone, tokenizer or template\n```\n',
        "vllm": vllm,
        "tgi": f"```bash\ntext-generation-launcher --model-id {where}\n```\n\nThe same folder in vLLM:\n\n" + vllm,
        "trtllm": "Convert with TensorRT-LLM's Medusa example (up to 1.2.1), this folder as `--medusa_model_dir`, "
        f"`--num_medusa_heads {heads}`; the tree of `medusa_choices.json` goes to the run script.\n",
        "fasterdecoding": "For FasterDecoding/Medusa. Its loader wants `medusa_lm_head.pt`; make it there:\n\n"
        "```python\nimport torch, safetensors.torch as s\n\n"
        'torch.save(s.load_file("medusa_lm_head.safetensors"), "medusa_lm_head.pt")\n```\n',
        "hf-full": "A whole model folder in the Medusa-2 layout: base weights and `medusa_head.*` tensors. "
        f"`medusa-train import {where} --base {base}` reads it.\n",
    }[form]
    return f"## Loading\n\n{text}"


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _public(recipe: Any) -> Any:
    """The recipe with folders of the training machine cut to their last part."""
    if isinstance(recipe, dict):
        return {key: _public(value) for key, value in recipe.items()}
    if isinstance(recipe, list):
        return [_public(value) for value in recipe]
    if isinstance(recipe, str) and Path(recipe).is_absolute():
        return Path(recipe).name
    return recipe
