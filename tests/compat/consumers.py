"""Other programs' loaders, written again from what is known of their layouts: strict where they are strict, silent
where they are silent. Nothing here looks at medusa_train, so that a mistake there cannot hide in a shared helper.

Every loader returns a function hidden_MD -> list of logits, one [M, V] per head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

Heads = Callable[[Tensor], list[Tensor]]


def residual(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x + F.silu(F.linear(x, weight, bias))


# ------------------------------------------------------------------------------------------------ vLLM 0.32.0


def vllm_config(folder: Path) -> dict[str, Any]:
    """Defaults, and any key with "num" and "heads" (or "layers") in it overwriting the count, the last one winning."""
    raw = json.loads((folder / "config.json").read_text())
    for key in list(raw):
        if "num" in key:
            if "heads" in key:
                raw["num_heads"] = raw.pop(key)
            elif "layers" in key:
                raw["num_hidden_layers"] = raw.pop(key)
    defaults = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    config = defaults | raw
    if config.get("truncated_vocab_size") is None:
        config["truncated_vocab_size"] = config["vocab_size"]
    return config


class VllmHeads(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, bias = config["hidden_size"], config.get("medusa_fc_bias", False)
        self.config, self.token_map = config, None
        self.blocks = nn.ModuleList()
        for _ in range(config["num_heads"]):
            block = nn.Module()
            block.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(config["num_hidden_layers"]))
            self.blocks.append(block)
        if config.get("original_lm_head", False):
            self.lm_head = nn.Linear(size, config["truncated_vocab_size"], bias=False)
            self.projections = [self.lm_head] * config["num_heads"]
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, config["vocab_size"], bias=False) for _ in range(config["num_heads"])
            )
            self.projections = list(self.lm_heads)

    @staticmethod
    def remap(name: str) -> str:
        parts = name.split(".")
        if len(parts) >= 3 and parts[0].isdigit() and parts[1].isdigit():
            rest = parts[2:]
            if "linear" in rest:
                return f"blocks.{parts[0]}.layers.{parts[1]}.{'.'.join(rest[rest.index('linear') + 1 :])}"
            return f"lm_heads.{parts[0]}.{'.'.join(rest)}"
        return name

    def load(self, weights: dict[str, Tensor]) -> tuple[set[str], set[str]]:
        """(parameters filled, tensors that went nowhere): neither is an error there."""
        parameters, filled, unused = dict(self.named_parameters()), set(), set()
        for original, tensor in weights.items():
            name = self.remap(original.replace("medusa_heads.", ""))
            if name not in parameters:
                if self.config.get("original_lm_head") and name == "lm_heads.0.weight":
                    name = "lm_head.weight"
                else:
                    unused.add(original)
                    continue
            with torch.no_grad():
                assert parameters[name].shape == tensor.shape, f"{name}: {tensor.shape}"
                parameters[name].copy_(tensor)
            filled.add(name)
        return filled, unused

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for block, projection in zip(self.blocks, self.projections, strict=True):
            z = x
            for layer in block.layers:
                z = z + F.silu(layer(z))
            found.append(projection(z))
        return found


def load_vllm(folder: Path) -> tuple[VllmHeads, set[str], set[str]]:
    """(module, parameters never filled, tensors never used)."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, "falls back to .bin and .pt, which nobody writes here"
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    heads = VllmHeads(vllm_config(folder))
    for parameter in heads.parameters():
        nn.init.normal_(parameter)  # what is never filled stays random there too
    filled, unused = heads.load(weights)
    return heads, set(dict(heads.named_parameters())) - filled, unused


# ------------------------------------------------------------------------------------- Text Generation Inference


def load_tgi(folder: Path, base: dict[str, Tensor]) -> tuple[str, Heads]:
    """("own" or "shared", heads). `base`: the served model's tensors; a name in both is an error."""
    config = json.loads((folder / "config.json").read_text())
    if "architectures" in config:
        raise RuntimeError("taken for a plain model: the heads are never looked at")
    assert config["base_model_name_or_path"]
    routing = dict(base)
    with safe_open(folder / "medusa_lm_head.safetensors", framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118
            if name in routing:
                raise RuntimeError(f"duplicate tensor {name}")
            routing[name] = handle.get_tensor(name)
    count = config["medusa_num_heads"]
    try:
        return "own", _tgi_own(routing, count, config["medusa_num_layers"])
    except Exception:
        return "shared", _tgi_shared(routing, count, config["medusa_num_layers"])


def _tgi_own(routing: dict[str, Tensor], count: int, layers: int) -> Heads:
    heads = [
        (
            [(routing[f"{i}.{j}.linear.weight"], routing[f"{i}.{j}.linear.bias"]) for j in range(layers)],
            routing[f"{i}.{layers}.weight"],
        )
        for i in range(count)
    ]

    def run(x: Tensor) -> list[Tensor]:
        found = []
        for blocks, projection in heads:
            z = x
            for weight, bias in blocks:
                z = residual(z, weight, bias)
            found.append(F.linear(z, projection))
        return found

    return run


def _tgi_shared(routing: dict[str, Tensor], count: int, layers: int) -> Heads:
    assert layers == 1, "shared heads have exactly one layer there"
    weight = torch.cat([routing[f"{i}.0.linear.weight"] for i in range(count)])
    bias = torch.cat([routing[f"{i}.0.linear.bias"] for i in range(count)])

    def run(x: Tensor) -> list[Tensor]:
        steps = F.silu(F.linear(x, weight, bias)).reshape(*x.shape[:-1], count, x.shape[-1])
        return list(F.linear(x[..., None, :] + steps, routing["lm_head.weight"]).unbind(-2))

    return run


def load_lorax(folder: Path, lm_head: Tensor) -> Heads:
    """Shared heads of one layer, as an adapter; config version 2 or more. Own projections crash there."""
    config = json.loads((folder / "config.json").read_text())
    if int(config.get("version", 0)) < 2:
        raise RuntimeError("own projections: not supported")
    weights = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    return _tgi_shared(weights | {"lm_head.weight": lm_head}, config["medusa_num_heads"], config["medusa_num_layers"])


# ------------------------------------------------------------------------------------------------- TensorRT-LLM


def load_trtllm(folder: Path) -> Heads:
    """Every block with its bias and every projection by name, nothing optional; `.pt` first, else safetensors."""
    config = json.loads((folder / "config.json").read_text())
    pickled = folder / "medusa_lm_head.pt"
    state = (
        torch.load(pickled, weights_only=True) if pickled.exists() else load_file(folder / "medusa_lm_head.safetensors")
    )
    return _tgi_own(state, config["medusa_num_heads"], config["medusa_num_layers"])


# ------------------------------------------------------------------------------------------------ FasterDecoding


class RepeatedBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)  # its weight is zeroed there, its bias stays random
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return residual(x, self.linear.weight, self.linear.bias)


def load_fasterdecoding_v01(folder: Path, vocab: int, hidden: int) -> Heads:
    """`[block] * layers`, own projections, `.pt`, strict=False: what is missing stays as it was made."""
    config = json.loads((folder / "config.json").read_text())
    state = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    heads = nn.ModuleList(
        nn.Sequential(*([RepeatedBlock(hidden)] * config["medusa_num_layers"]), nn.Linear(hidden, vocab, bias=False))
        for _ in range(config["medusa_num_heads"])
    )
    heads.load_state_dict(state, strict=False)
    return lambda x: [head(x) for head in heads]


def load_fasterdecoding_head(folder: Path, lm_head: Tensor) -> Heads:
    """The later, shared form: blocks only, then the base's lm_head."""
    config = json.loads((folder / "config.json").read_text())
    assert config["version"] == "2"
    state = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    hidden = lm_head.shape[1]
    heads = nn.ModuleList(
        nn.Sequential(*([RepeatedBlock(hidden)] * config["medusa_num_layers"]))
        for _ in range(config["medusa_num_heads"])
    )
    heads.load_state_dict(state, strict=False)
    return lambda x: [F.linear(head(x), lm_head) for head in heads]


# ----------------------------------------------------------------------------------------- whole model folders


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a (possibly sharded) model folder, through the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert set(weight_map) == {name for shard in shards.values() for name in shard}, "index and shards differ"
    return {name: shards[file][name] for name, file in weight_map.items()}


def load_medusa_2(folder: Path) -> tuple[Heads, dict[str, Tensor]]:
    """(heads, the base's tensors): base names, `medusa_head.` names beside them; counts in the model's config."""
    config, tensors = json.loads((folder / "config.json").read_text()), read_folder(folder)
    prefix = "medusa_head."
    state = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    base = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    return _tgi_own(state, config["medusa_num_heads"], config["medusa_num_layers"]), base


# -------------------------------------------------------------------------------------- writers, for imports


def write_modelopt(folder: Path, base_folder: Path, state: dict[str, Tensor], heads: int, layers: int) -> None:
    """A ModelOpt folder: the base's files, heads under `medusa_heads.`, counts in a nested entry; and its pickle."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = read_folder(base_folder) | {f"medusa_heads.{name}": tensor for name, tensor in state.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((base_folder / "config.json").read_text())
    config["medusa"] = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"modelopt_state": object}, folder / "modelopt_state.pth")
