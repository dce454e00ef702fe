"""Wrote the checkpoints in `fixtures/abi_v1`; kept to show what is in them. Never run it again for version 1.

The numbers are a rule, so that the test needs no second copy of them: element i of tensor number t (names sorted) is
((7 t + 3 i) % 31 - 15) / 8, exact in every dtype. Usage: python -m tests.checkpoint.make_fixture FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from medusa_train.modeling.heads import HeadsConfig, MedusaHeads
from tests.checkpoint.support import save_toy

TOKEN_MAP = [7, 0, 3, 5, 1]


def ruled(heads: MedusaHeads) -> MedusaHeads:
    """The heads with the rule's numbers in them."""
    state = heads.state_dict()
    for number, name in enumerate(sorted(state)):
        tensor = state[name]
        if name == "token_map":
            tensor.copy_(torch.tensor(TOKEN_MAP))
        else:
            count = torch.arange(tensor.numel())
            tensor.copy_((((7 * number + 3 * count) % 31 - 15) / 8).reshape(tensor.shape))
    return heads


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    own = ruled(MedusaHeads(HeadsConfig("own", 2, 2, 4, 8, projection_bias=True), dtype=torch.bfloat16))
    save_toy(folder / "own", own, training={"steps": 3, "loss": 1.25})
    reduced = ruled(MedusaHeads(HeadsConfig("reduced", 3, 1, 4, 8, reduced_vocab_size=5), dtype=torch.float32))
    save_toy(folder / "reduced", reduced, tree=None)
    shared = ruled(MedusaHeads(HeadsConfig("shared", 2, 1, 4, 8), dtype=torch.float16))
    adapter = folder / "adapter-source"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]})
    )
    save_file({"base_model.model.q.lora_A.weight": torch.ones(1, 4)}, adapter / "adapter_model.safetensors")
    save_toy(folder / "shared_adapter", shared, policy="self_distill", adapter=adapter)
    for path in adapter.iterdir():
        path.unlink()
    adapter.rmdir()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
