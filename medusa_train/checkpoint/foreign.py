"""Reading other programs' heads: safetensors, or `.pt`/`.bin` files that hold tensors and nothing else.

A pickle can run code when it is read. Only torch's restricted reader (weights_only) is ever used, and a file that holds
anything but a flat table of named tensors is refused even where that reader would take it.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint import layouts
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.tensorfile import read_header
from medusa_train.errors import UserError

# No heads are near it; a number out of a damaged name would otherwise ask for as many tensors.
_MOST = 255
_PICKLED = (".pt", ".bin", ".pth")
# What programs write beside the heads and never belongs to them.
_NEVER_READ = ("training_args.bin", "optimizer.pt", "scheduler.pt", "modelopt_state.pth", "rng_state.pth")


@dataclass
class ForeignHeads:
    """What was found in another program's files.

    Attributes:
        source: the folder or file; config: its config.json ({} where there is none); files: what was read.
        blocks: (head, layer, part) -> tensor; projections: head -> tensor [V, D]; projection_biases likewise.
        token_map: vLLM's int tensor [V'], or None.
        names: slot key -> the name it had, for messages.
        layouts: the layouts whose names were met; backbone: names of tensors that are no head's, by file.
        notes: what was done to them, for the person.
    """

    source: Path
    config: dict[str, Any]
    files: list[Path]
    blocks: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)
    projections: dict[int, Tensor] = field(default_factory=dict)
    projection_biases: dict[int, Tensor] = field(default_factory=dict)
    projection_layers: dict[int, int] = field(default_factory=dict)
    token_map: Tensor | None = None
    layouts: set[str] = field(default_factory=set)
    backbone: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def whole_model(self) -> bool:
        """True for a folder that holds a backbone too (Medusa-2, ModelOpt): it has embeddings, not a stray tensor."""
        return any(part in name for name in self.backbone for part in ("embed", "wte", "word_emb"))


def read_foreign(source: Path) -> ForeignHeads:
    """Reads a heads file or folder of another program; nothing is judged yet but what cannot be read.

    Raises:
        UserError: nothing there, a damaged or unsafe file, no tensor that is a head's.
    """
    files = _weight_files(source)
    config = _config_of(source)
    found, problems = ForeignHeads(source, config, files), Problems()
    places: dict[tuple[int, int, int], str] = {}
    for path in files:
        for name, tensor in read_tensors(path, problems).items():
            slot = layouts.parse_name(name)
            if slot is None:
                found.backbone[name] = path
                continue
            _own_memory_note(name, tensor, places, found)
            _take(found, slot, name, tensor, problems)
    if not found.blocks and not found.projections and not problems:
        raise UserError(
            "no tensor in it is named like one of a Medusa head",
            where=str(source),
            allowed="0.0.linear.weight, medusa_head.0.0.linear.weight, blocks.0.layers.0.weight, ...",
        )
    if not found.whole_model:
        for name in sorted(found.backbone):
            problems.add(
                "unexpected", f"{found.backbone[name].name} [{name}]", "no layout has such a tensor", _NOT_HEADS
            )
    problems.raise_if_any("these heads cannot be imported", source)
    return found


_NOT_HEADS = "import a file or folder that holds heads of one program, or remove what does not belong to them"


def _take(found: ForeignHeads, slot: layouts.Slot, name: str, tensor: Tensor, problems: Problems) -> None:
    """Puts a tensor into its slot; a slot that is filled twice is a mix of two layouts."""
    if slot.kind == "token_map":
        found.token_map = tensor
        return
    found.layouts.add(slot.layout)
    if max(slot.head, slot.layer) > _MOST or tensor.dim() == 0:
        what = "holds a single number" if tensor.dim() == 0 else f"numbers above {_MOST} are no head's and no layer's"
        problems.add("unexpected", name, what, _NOT_HEADS)
        return
    if slot.kind == "block":
        table, key = found.blocks, (slot.head, slot.layer, slot.part)
    else:
        table, key = (found.projections if slot.part == "weight" else found.projection_biases), slot.head
        if slot.layer >= 0:
            found.projection_layers[slot.head] = slot.layer
    if key in table:
        problems.add("unexpected", name, "a second tensor for the same place (two layouts in one folder)", _NOT_HEADS)
    table[key] = tensor


def _own_memory_note(name: str, tensor: Tensor, places: dict, found: ForeignHeads) -> None:
    if not tensor.numel():
        return
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.numel())
    if place in places:
        found.notes.append(f"{name} and {places[place]} were one tensor in the file (aliased); now each is its own")
    places.setdefault(place, name)


def read_tensors(path: Path, problems: Problems) -> dict[str, Tensor]:
    """All tensors of one file on the CPU; {} and an entry in `problems` where it is damaged or unsafe."""
    if path.suffix == ".safetensors":
        before = len(problems.found)
        if read_header(path, problems) is None or len(problems.found) > before:
            return {}
        from safetensors.torch import load_file

        return load_file(path, device="cpu")
    return _read_pickled(path, problems)


def _read_pickled(path: Path, problems: Problems) -> dict[str, Tensor]:
    fix = "ask its author for safetensors; a pickle that holds more than tensors can run code when it is opened"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().split("\n")[0]
        problems.add("unsafe", path.name, f"refused, it is no plain table of tensors ({reason})", fix)
        return {}
    except (
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        OSError,
        zipfile.BadZipFile,
        AttributeError,
        TypeError,
    ) as error:
        problems.add("size", path.name, f"cannot be read as a torch file ({type(error).__name__})", "download it again")
        return {}
    if not isinstance(content, dict):
        problems.add("unsafe", path.name, f"holds a {type(content).__name__}, not a table of tensors", fix)
        return {}
    strangers = [
        f"{name!r}: {type(value).__name__}"
        for name, value in content.items()
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta
    ]
    if strangers:
        problems.add("unsafe", path.name, f"holds more than named tensors: {', '.join(strangers[:3])}", fix)
        return {}
    return {name: value.detach() for name, value in content.items()}


def _weight_files(source: Path) -> list[Path]:
    """The files to read: the file itself, or what the folder holds, safetensors before pickles, heads files first."""
    if source.is_file():
        if source.suffix not in (".safetensors", *_PICKLED):
            raise UserError("not a weights file", where=str(source), allowed=".safetensors, .pt, .bin")
        return [source]
    if not source.is_dir():
        raise UserError("nothing there to import", where=str(source), fix="name a folder, a weights file or a hub id")
    named = [source / name for name in (layouts.HEADS_SAFETENSORS, layouts.HEADS_PT) if (source / name).is_file()]
    tensors = sorted(source.glob("*.safetensors"))
    pickles = sorted(p for s in _PICKLED for p in source.glob(f"*{s}") if p.name not in _NEVER_READ)
    rest = [path for path in tensors if path not in named]
    if any(source.glob("adapter_model.*")):
        raise UserError(
            "an adapter lies beside the heads, so they belong to a changed backbone",
            where=str(source),
            fix="merge the adapter into the model with peft (`merge_and_unload`) and save heads and model together",
        )
    if named and not rest:  # a backbone in pickles beside the heads is a changed backbone all the same
        rest = [path for path in pickles if path.name.startswith("pytorch_model")]
    chosen = [*named[:1], *rest] or pickles
    if not chosen:
        raise UserError("no weights there", where=str(source), allowed="*.safetensors, *.pt or *.bin")
    return chosen


def _config_of(source: Path) -> dict[str, Any]:
    path = (source if source.is_dir() else source.parent) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("config.json is not JSON", where=str(path), fix="mend or remove it") from error
    if not isinstance(config, dict):
        raise UserError("config.json is not a JSON object", where=str(path))
    return config
