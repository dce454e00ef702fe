"""What is the matter with a checkpoint: hashes again, the base beside it, what each head learnt, what would fail."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.checkpoint import abi, layouts
from medusa_train.checkpoint.headstats import HeadStats, base_projection, head_stats
from medusa_train.checkpoint.identity import check_backbone
from medusa_train.checkpoint.inspect_ import inspect_checkpoint
from medusa_train.checkpoint.manifest import HeadsManifest
from medusa_train.checkpoint.problems import Problem, Problems
from medusa_train.errors import UserError
from medusa_train.provenance import environment, library_versions

# Modules that single policies or commands need beyond the core: module -> (what for, how to get it).
EXTRAS = {
    "bitsandbytes": ("8-bit and 4-bit backbones, 8-bit AdamW", "pip install 'medusa-train[quant]'"),
    "deepspeed": ("fit under DeepSpeed", "pip install 'medusa-train[deepspeed]'"),
    "wandb": ("training.report_to: wandb", "pip install 'medusa-train[wandb]'"),
    "liger_kernel": ("fused losses on CUDA", "pip install 'medusa-train[liger]'"),
}


@dataclass
class Diagnosis:
    """Everything `doctor` found; plain data, so that `--json` is the whole of it.

    Attributes:
        healthy: no fault found (warnings leave a checkpoint healthy).
        problems: faults. warnings: what works and is still worth knowing. notes: what could not be checked, and why.
        tensors: rows of name, dtype, shape, bytes, norm. heads: statistics per head.
        stops: command or "export FORMAT" -> reasons why it would stop.
        base: how the base compares: "same", "different", "not found", "not asked".
    """

    checkpoint: str | None
    healthy: bool = True
    base: str = "not asked"
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    heads: list[HeadStats] = field(default_factory=list)
    stops: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def examine_environment(diagnosis: Diagnosis) -> None:
    """Versions, devices and optional libraries."""
    import importlib.util

    import torch

    diagnosis.environment = environment()
    diagnosis.devices = [{"name": "cpu", "threads": torch.get_num_threads(), "bf16": _cpu_bf16()}]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        diagnosis.devices.append(
            {
                "name": f"cuda:{index} {facts.name}",
                "memory_bytes": facts.total_memory,
                "bf16": torch.cuda.is_bf16_supported(),
            }
        )
    if torch.backends.mps.is_available():
        diagnosis.devices.append({"name": "mps", "bf16": True})
    for module, (purpose, remedy) in EXTRAS.items():
        present = importlib.util.find_spec(module) is not None
        diagnosis.extras[module] = {"present": present, "for": purpose, "get": remedy}


def _cpu_bf16() -> str:
    """Whether bf16 products are done by the processor's own instructions, from its flags."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return "unknown"
    if "amx_bf16" in flags:
        return "native (AMX)"
    return "native (AVX-512)" if "avx512_bf16" in flags else "emulated: float32 may be faster"


def examine_checkpoint(folder: Path, diagnosis: Diagnosis, base: str | None = None) -> None:
    """Integrity, base, head statistics, and what would stop the other commands."""
    problems = Problems()
    manifest, heads_file = inspect_checkpoint(folder, problems, hashes=True)
    if manifest is not None:
        _summarise(manifest, diagnosis)
        base_folder = _compare_base(folder, manifest, base, problems, diagnosis)
        whole = heads_file is not None and not any(p.where.startswith(abi.HEADS_FILE) for p in problems.found)
        if whole:
            projection = None if base_folder is None else base_projection(base_folder, manifest)
            diagnosis.heads, diagnosis.tensors = head_stats(folder / abi.HEADS_FILE, manifest, projection)
            diagnosis.warnings += [warning for head in diagnosis.heads for warning in head.warnings]
        else:
            diagnosis.notes.append("head statistics are left out: the heads file is damaged")
        _versions(manifest, diagnosis)
    diagnosis.problems = problems.found
    diagnosis.healthy = not problems
    if manifest is not None:
        _find_stops(folder, manifest, diagnosis)


def _summarise(manifest: HeadsManifest, diagnosis: Diagnosis) -> None:
    entry = manifest.backbone
    diagnosis.summary = {
        "layout version": manifest.abi_version,
        "written": manifest.created,
        "contract": manifest.head_contract,
        "heads": manifest.medusa_num_heads,
        "layers": manifest.medusa_num_layers,
        "hidden size": manifest.hidden_size,
        "vocabulary": manifest.vocab_size,
        "reduced vocabulary": manifest.reduced_vocab_size,
        "heads see": abi.describe_sight(manifest.sees, manifest.reads_layer),
        "dtype": manifest.dtype,
        "policy": manifest.policy,
        "base": entry.name,
        "base revision": entry.revision,
        "base fingerprint": entry.fingerprint,
        "backbone": entry.changed if entry.changed != "none" else "unchanged",
        "chat template": entry.chat_template_hash,
        "data manifest": manifest.data_manifest_hash,
        "tree": "stored" if abi.TREE_FILE in manifest.files else "none yet",
    }


def _compare_base(
    folder: Path, manifest: HeadsManifest, base: str | None, problems: Problems, diagnosis: Diagnosis
) -> Path | None:
    """Compares the base's marks (no weights are loaded); the folder whose projection the heads use, or None."""
    from medusa_train.checkpoint.importing import backbone_marks
    from medusa_train.checkpoint.load import known_name, template_of

    entry = manifest.backbone
    name = base or known_name(entry.name)
    if entry.changed == "merged" and base is None:
        name = str(folder / abi.BACKBONE_FOLDER)
    try:
        revision = entry.revision if base is None and entry.changed != "merged" else None
        found = backbone_marks(name, revision, template_of(folder))
    except UserError as error:
        diagnosis.base = "not found"
        diagnosis.notes.append(f"the base could not be compared: {error.what}")
        if base is not None:
            problems.add("backbone", str(base), error.what, error.fix or "name the base's folder or hub id with --base")
        return None
    before = len(problems.found)
    check_backbone(manifest, found, problems)
    diagnosis.base = "same" if len(problems.found) == before else "different"
    return found.folder


def _versions(manifest: HeadsManifest, diagnosis: Diagnosis) -> None:
    now = library_versions()
    for name, then in manifest.library_versions.items():
        if name in now and now[name] != then:
            diagnosis.notes.append(f"{name}: written with {then}, here {now[name]}")


def _find_stops(folder: Path, manifest: HeadsManifest, diagnosis: Diagnosis) -> None:
    """Reasons why other commands would stop, by command."""
    faults = [str(problem) for problem in diagnosis.problems]
    gone = [f"the base {manifest.backbone.name} is not here"] if diagnosis.base == "not found" else []
    commands = ["fit", "tree", "eval-acceptance", "generate", *(f"export --format {name}" for name in layouts.FORMATS)]
    for command in commands:
        reasons = list(faults)
        if not command.startswith("export"):
            reasons += gone
        elif not faults:
            form = layouts.FORMATS[command.rsplit(" ", 1)[1]]
            reasons += _export_refusal(folder, form)
            reasons += gone if _export_needs_base(form, manifest) else []
        if command == "fit" and diagnosis.extras:
            reasons += _fit_needs(manifest, diagnosis)
        diagnosis.stops[command] = list(dict.fromkeys(reasons))
    diagnosis.stops = {command: reasons for command, reasons in diagnosis.stops.items() if reasons}


def _export_needs_base(form: layouts.ExportFormat, manifest: HeadsManifest) -> bool:
    """Whole-model folders hold it; shared heads travel with a copy of its lm_head, or are expanded with it."""
    shared = manifest.head_contract == "shared"
    return form.name == "hf-full" or (shared and (form.lm_head_copy or not form.shared(manifest.medusa_num_layers)))


def _export_refusal(folder: Path, form: layouts.ExportFormat) -> list[str]:
    from medusa_train.checkpoint.exporting import refusals
    from medusa_train.checkpoint.load import load_checkpoint

    return [problem.what for problem in refusals(form, load_checkpoint(folder), with_tree=True).found]


def _fit_needs(manifest: HeadsManifest, diagnosis: Diagnosis) -> list[str]:
    """Libraries that the recipe of this checkpoint asks for and that are absent."""
    quantization = (manifest.recipe.get("base") or {}).get("quantization")
    training = manifest.recipe.get("training") or {}
    asked = {
        "bitsandbytes": bool(quantization) or "8bit" in str(training.get("optim", "")),
        "deepspeed": bool(training.get("deepspeed")),
        "wandb": "wandb" in str(training.get("report_to", "")),
    }
    return [
        f"the recipe needs {module}, which is not installed ({diagnosis.extras[module]['get']})"
        for module, wanted in asked.items()
        if wanted and not diagnosis.extras[module]["present"]
    ]
