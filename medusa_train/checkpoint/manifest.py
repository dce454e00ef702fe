"""The manifest of a checkpoint: what it holds, what it was trained for, and the hash of every byte beside it.

`medusa_manifest.json` vouches for itself too: `manifest_sha256` is the sha256 of the file's bytes with those 64 digits
replaced by zeros, so any changed byte shows, with no canonical form to agree on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.problems import Problems
from medusa_train.provenance import sha256_bytes

Hash = str
_ZEROS = "0" * 64
_SEAL = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')
RESTORE = "restore the checkpoint from a copy, or run `medusa-train fit` again"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class FileEntry(_Part):
    """Size and sha256 (64 hex digits) of one file of the checkpoint."""

    bytes: int = Field(ge=0)
    sha256: Hash = Field(pattern="^[0-9a-f]{64}$")


class BackboneEntry(_Part):
    """The model the heads read.

    Attributes:
        name: hub id or folder it was loaded from.
        revision: hub commit, or None for a folder.
        fingerprint: hash of its config, tokenizer and weights (`modeling.fingerprint.fingerprint_folder`).
        chat_template_hash: of the template that rendered the training rows, or None where there is none.
        config_hash, tokenizer_hash: of these parts alone, to say what differs where the fingerprint does.
        changed: "none"; "adapter" (`adapter/` holds it); "merged" (`backbone/` holds the whole model).
        merged_fingerprint: fingerprint of `backbone/` where changed is "merged".
    """

    name: str
    revision: str | None = None
    fingerprint: str
    chat_template_hash: str | None = None
    config_hash: str | None = None
    tokenizer_hash: str | None = None
    changed: Literal["none", "adapter", "merged"] = "none"
    merged_fingerprint: str | None = None


class HeadsManifest(_Part):
    """ABI versions 1, 2. K = medusa_num_heads, R = medusa_num_layers, D = hidden_size, V = vocab_size (lm_head rows).

    Attributes:
        sees: what heads read besides the last hidden state: nothing, or the token before the one they guess.
        reads_layer: the middle layer whose hidden state they read as well, from 1; None: none.
        offsets: per head, how far ahead it predicts: j + 2.
        dtype: safetensors name of the heads' dtype (BF16, F16, F32, F64).
        policy: heads_only (Medusa-1), joint (Medusa-2), self_distill.
        recipe: the resolved recipe, as plain JSON.
        training: what the run reports of itself (steps, tokens, losses, seconds).
        header_sha256: of the JSON header of the heads file; names, shapes and places of all tensors hang on it.
        tensors: tensor name -> sha256 of its bytes.
        files: relative path -> size and hash, every file but the manifest.
    """

    abi_version: Literal[1, 2] = 1
    kind: Literal["medusa-train heads"] = "medusa-train heads"
    created: str
    head_contract: Literal["own", "shared", "reduced"]
    medusa_num_heads: int = Field(ge=1)
    medusa_num_layers: int = Field(ge=0)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    reduced_vocab_size: int | None = None
    projection_bias: bool = False
    sees: Literal["hidden", "parent"] = "hidden"
    reads_layer: int | None = Field(default=None, ge=1)
    offsets: list[int]
    dtype: Literal["F64", "F32", "F16", "BF16"]
    backbone: BackboneEntry
    policy: Literal["heads_only", "joint", "self_distill"]
    recipe: dict[str, Any]
    data_manifest_hash: str | None
    training: dict[str, Any]
    library_versions: dict[str, str]
    header_sha256: Hash
    tensors: dict[str, Hash]
    files: dict[str, FileEntry]
    manifest_sha256: Hash = Field(default=_ZEROS, pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _consistent(self) -> HeadsManifest:
        if self.offsets != abi.offsets(self.medusa_num_heads):
            raise ValueError(f"offsets {self.offsets} are not j + 2 per head: {abi.offsets(self.medusa_num_heads)}")
        if (self.abi_version == abi.PLAIN_VERSION) != (self.sees == "hidden"):
            raise ValueError(f"layout version {self.abi_version} with heads that see {self.sees!r}")
        if self.reads_layer is not None and self.sees == "hidden":
            raise ValueError("reads_layer belongs to heads that see the parent")
        if (self.reduced_vocab_size is not None) != (self.head_contract == "reduced"):
            raise ValueError("reduced_vocab_size belongs to the contract `reduced`, and that needs it")
        if self.policy == "heads_only" and self.backbone.changed != "none":
            raise ValueError("policy heads_only leaves the backbone as it is, yet it is marked as changed")
        if self.policy != "heads_only" and self.backbone.changed == "none":
            raise ValueError(
                f"policy {self.policy} changes the backbone, yet neither adapter nor merged weights are there"
            )
        for path in self.files:
            if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
                raise ValueError(f"the file name {path!r} leaves the checkpoint")
        return self

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the heads file."""
        return abi.expected_tensors(
            contract=self.head_contract,
            heads=self.medusa_num_heads,
            layers=self.medusa_num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            reduced_vocab_size=self.reduced_vocab_size,
            projection_bias=self.projection_bias,
            sees=self.sees,
            reads_layer=self.reads_layer,
        )

    def sealed_bytes(self) -> bytes:
        """The file's bytes, with `manifest_sha256` filled in."""
        content = self.model_dump(mode="json")
        content["manifest_sha256"] = _ZEROS
        if self.abi_version == abi.PLAIN_VERSION:  # programs that know version 1 alone refuse other fields
            del content["sees"], content["reads_layer"]
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        unsealed = text.encode()
        return unsealed.replace(
            f'"manifest_sha256": "{_ZEROS}"'.encode(), f'"manifest_sha256": "{sha256_bytes(unsealed)}"'.encode()
        )

    def config(self) -> dict[str, Any]:
        """What `config.json` says: the counts again, for programs and people that read no manifest."""
        more = {} if self.sees == "hidden" else {"sees": self.sees, "reads_layer": self.reads_layer}
        return {
            "model_type": abi.MODEL_TYPE,
            "base_model_name_or_path": self.backbone.name,
            "medusa_num_heads": self.medusa_num_heads,
            "medusa_num_layers": self.medusa_num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "head_contract": self.head_contract,
            "reduced_vocab_size": self.reduced_vocab_size,
            "projection_bias": self.projection_bias,
            "dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[self.dtype],
            "checkpoint_abi_version": self.abi_version,
            **more,
        }


def read_manifest(folder: Path, problems: Problems) -> HeadsManifest | None:
    """Reads and checks the manifest; None where it cannot be used, the reasons in `problems`."""
    path, name = folder / abi.MANIFEST_FILE, abi.MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        problems.add(
            "missing",
            name,
            "the file is missing",
            f"name a folder that `medusa-train fit` or `import` wrote; {RESTORE}",
        )
        return None
    except OSError as error:
        problems.add("missing", name, f"the file cannot be read ({error.strerror or error})", RESTORE)
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        problems.add("manifest", name, f"not JSON ({type(error).__name__})", RESTORE)
        return None
    if not isinstance(content, dict):
        problems.add("manifest", name, "not a JSON object", RESTORE)
        return None
    version = content.get("abi_version")
    if type(version) is int and version > abi.ABI_VERSION:
        problems.add(
            "abi",
            name,
            f"written with checkpoint layout {version}; this program reads up to {abi.ABI_VERSION}",
            "upgrade: pip install --upgrade medusa-train",
        )
        return None
    _check_seal(raw, problems)
    try:
        return HeadsManifest.model_validate_json(raw)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            at = ".".join(str(part) for part in fault["loc"])
            problems.add("manifest", f"{name}{' ' + at if at else ''}", fault["msg"], RESTORE)
        return None


def _check_seal(raw: bytes, problems: Problems) -> None:
    seals = _SEAL.findall(raw)
    if len(seals) != 1:
        problems.add("hash", abi.MANIFEST_FILE, "it does not carry its own hash exactly once", RESTORE)
        return
    if sha256_bytes(raw.replace(seals[0], _ZEROS.encode(), 1)) != seals[0].decode():
        problems.add("hash", abi.MANIFEST_FILE, "its bytes were changed after it was written", RESTORE)
