"""Writing a checkpoint: checked before, written beside, read again, compared, swapped in."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.atomic import carry_over, link_or_copy, staged_folder
from medusa_train.checkpoint.changed import stage_adapter, stage_merged
from medusa_train.checkpoint.identity import backbone_entry, sizes_of
from medusa_train.checkpoint.inspect_ import check_token_map, count_non_finite, inspect_checkpoint
from medusa_train.checkpoint.manifest import FileEntry, HeadsManifest
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.rank_paths import check_tree
from medusa_train.checkpoint.tensorfile import read_header, write_tensors
from medusa_train.errors import UserError
from medusa_train.provenance import library_versions, sha256_file

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_REFUSED = "this checkpoint is refused, nothing was written"


def save_checkpoint(
    folder: str | Path,
    heads: Any,
    base: Any,
    *,
    recipe: Any,
    policy: Any,
    data_manifest_hash: str | None,
    training: dict[str, Any],
    adapter: Any = None,
    merged: Any = None,
    tree: dict[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint `folder`, all of it or nothing of it; an older checkpoint there is replaced in one step.

    Args:
        folder: absent, empty, or an older checkpoint (files in it that no manifest lists are carried over).
        heads: `modeling.heads.MedusaHeads`, all parameters in one floating-point dtype.
        base: the `modeling.base.Base` they were trained on, or its `BackboneId`.
        recipe: the resolved recipe, a dict or a pydantic model.
        policy: "heads_only", "joint" or "self_distill", or an object with that in `.kind`.
        data_manifest_hash: of the training data, None where there was none (imported heads).
        training: what the run says of itself, plain JSON.
        adapter: a PeftModel or the folder of a saved adapter; merged: the changed backbone as a model or its folder.
            Exactly one of them belongs to the policies that change the backbone, neither to heads_only.
        tree: the content of `tree.json`, or None.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: what is given cannot be a checkpoint (every reason at once), or what was read back differs.
        UserError: the folder belongs to something else, or the disk refused.
    """
    folder = Path(folder)
    policy = getattr(policy, "kind", policy)
    state = _checked_state(heads, base, policy, adapter, merged, tree, training, recipe)
    check_target(folder)
    with staged_folder(folder) as staged:
        kept = _keep_what_is_not_ours(folder, staged)
        write_tensors(staged / abi.HEADS_FILE, state)
        if base.tokenizer is not None:
            base.tokenizer.save_pretrained(staged)
        if adapter is not None:
            stage_adapter(staged / abi.ADAPTER_FOLDER, adapter, base.name)
        merged_fingerprint = None
        if merged is not None:
            merged_fingerprint = stage_merged(staged / abi.BACKBONE_FOLDER, merged, base.tokenizer)
        if tree is not None:
            (staged / abi.TREE_FILE).write_text(_json_text(tree), encoding="utf-8")
        changed = "adapter" if adapter is not None else "merged" if merged is not None else "none"
        header = read_header(staged / abi.HEADS_FILE, Problems())
        manifest = HeadsManifest(
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **_counts(heads.config),
            dtype=next(_DTYPE_NAMES[t.dtype] for name, t in state.items() if name not in abi.FIXED_DTYPES),
            backbone=backbone_entry(base, changed, merged_fingerprint),
            policy=policy,
            recipe=_plain(recipe),
            data_manifest_hash=data_manifest_hash,
            training=training,
            library_versions=library_versions(),
            header_sha256=header.header_sha256,
            tensors=header.digests(),
            files={},
        )
        (staged / abi.CONFIG_FILE).write_text(_json_text(manifest.config()), encoding="utf-8")
        _seal(staged, manifest, carried=set(), foreign=kept)
        _compare_with_memory(staged, state)
    return folder


def store_tree(folder: str | Path, tree: dict[str, Any] | None) -> None:
    """Puts `tree.json` into a checkpoint, or replaces it, or removes it (None); files and manifest change in one step.

    Raises:
        CheckpointError: the checkpoint is damaged, or the tree does not fit its heads.
    """
    folder, problems = Path(folder), Problems()
    manifest, _ = inspect_checkpoint(folder, problems, hashes=False)
    # A tree file that somebody damaged or laid there by hand is what this call mends.
    problems.found = [problem for problem in problems.found if problem.where != abi.TREE_FILE]
    if tree is not None and manifest is not None:
        check_tree(tree, manifest.medusa_num_heads, problems)
    problems.raise_if_any("the tree cannot be stored", folder)
    with staged_folder(folder) as staged:
        # The checkpoint's own files by content, so that a copy from the hub's cache (links) becomes files.
        for name in set(manifest.files) - {abi.TREE_FILE}:
            link_or_copy(folder / name, staged / name)
        carry_over(folder, staged, {*manifest.files, abi.MANIFEST_FILE, abi.TREE_FILE})
        if tree is not None:
            (staged / abi.TREE_FILE).write_text(_json_text(tree), encoding="utf-8")
        _seal(staged, manifest, carried=set(manifest.files) - {abi.TREE_FILE})


def _checked_state(
    heads: Any, base: Any, policy: Any, adapter: Any, merged: Any, tree: Any, training: Any, recipe: Any
) -> dict[str, Tensor]:
    """The tensors to write, on the CPU, each with its own memory; all that forbids writing is raised at once."""
    problems = Problems()
    if policy not in abi.POLICIES:
        problems.add(
            "policy", "policy", f"{policy!r} is not one of {', '.join(abi.POLICIES)}", "name the policy of the run"
        )
    elif (adapter is not None) + (merged is not None) != (policy != "heads_only"):
        what = "leaves the backbone unchanged, so no adapter and no merged weights belong to it"
        if policy != "heads_only":
            what = (
                "changes the backbone: exactly one of its adapter and its merged weights must be saved with the heads"
            )
        problems.add(
            "policy", f"policy {policy}", what, "save the heads together with the backbone they were trained with"
        )
    if not getattr(base, "fingerprint", None):
        problems.add("backbone", str(base.name), "has no fingerprint", "load it with `load_base`")
    hidden, vocab = sizes_of(base)
    for key, theirs, ours in (
        ("hidden_size", hidden, heads.config.hidden_size),
        ("vocab_size", vocab, heads.config.vocab_size),
    ):
        if theirs is not None and theirs != ours:
            problems.add(
                "shape", key, f"the backbone has {theirs}, the heads {ours}", "save heads with their own backbone"
            )
    if tree is not None:
        check_tree(tree, heads.config.medusa_num_heads, problems)
    for label, value in (("training", training), ("recipe", _plain(recipe))):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.add(
                "manifest", label, f"is not plain JSON: {error}", "pass numbers, text, lists and dicts; no NaN"
            )
    state = heads.state_dict()
    if abi.HIDDEN_RMS_NAME in state:  # heads.to(dtype) has cast it with the rest
        state[abi.HIDDEN_RMS_NAME] = state[abi.HIDDEN_RMS_NAME].float()
    _check_state(state, heads.config, problems)
    problems.raise_if_any(_REFUSED, "save")
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def _check_state(state: dict[str, Tensor], config: Any, problems: Problems) -> None:
    counts = _counts(config)
    expected = abi.expected_tensors(
        contract=config.contract,
        heads=config.medusa_num_heads,
        layers=config.medusa_num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        reduced_vocab_size=config.reduced_vocab_size,
        projection_bias=config.projection_bias,
        sees=config.sees,
        reads_layer=config.reads_layer,
    )
    fix = "build the heads with `modeling.heads.new_heads` and train those"
    if not expected:
        problems.add("empty", "heads", f"{counts['head_contract']} heads without layers have no tensor at all", fix)
    owners: dict[tuple[int, int], str] = {}
    dtypes = {tensor.dtype for name, tensor in state.items() if name not in abi.FIXED_DTYPES}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPE_NAMES):
        problems.add(
            "dtype",
            "heads",
            f"dtypes {sorted(map(str, dtypes))}; one floating-point dtype is needed",
            "heads.to(dtype) first",
        )
    for name in sorted(expected.keys() | state.keys()):
        if name not in state:
            problems.add("missing", name, f"the tensor is missing, shape {list(expected[name])}", fix)
        elif name not in expected:
            problems.add("unexpected", name, f"`{config.contract}` heads of these counts have no such tensor", fix)
        else:
            tensor = state[name]
            if tuple(tensor.shape) != expected[name]:
                problems.add("shape", name, f"shape {list(tensor.shape)}, {list(expected[name])} is needed", fix)
            if name == abi.TOKEN_MAP_NAME:
                check_token_map(tensor, config.vocab_size, name, problems)
            elif count_non_finite(tensor):
                problems.add(
                    "non-finite", name, "holds NaN or infinite numbers", "look for the step where the loss blew up"
                )
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
            if tensor.numel() and place in owners:
                problems.add(
                    "aliased",
                    name,
                    f"is the same memory as {owners[place]}",
                    "give every head and layer a block of its own",
                )
            owners.setdefault(place, name)


def _counts(config: Any) -> dict[str, Any]:
    return {
        "head_contract": config.contract,
        "medusa_num_heads": config.medusa_num_heads,
        "medusa_num_layers": config.medusa_num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "reduced_vocab_size": config.reduced_vocab_size,
        "projection_bias": config.projection_bias,
        "abi_version": abi.PLAIN_VERSION if config.sees == "hidden" else abi.ABI_VERSION,
        "sees": config.sees,
        "reads_layer": config.reads_layer,
        "offsets": abi.offsets(config.medusa_num_heads),
    }


def check_target(folder: Path) -> None:
    """A checkpoint may be written to `folder`: it is absent, empty, or an older checkpoint.

    Raises:
        UserError: something else stands there.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / abi.MANIFEST_FILE).is_file():
        raise UserError(
            "something else stands there, and a checkpoint replaces its whole folder",
            where=str(folder),
            allowed="a folder that is absent, empty, or an older checkpoint",
            fix="name another folder, for example one below this",
        )


def _keep_what_is_not_ours(folder: Path, staged: Path) -> set[str]:
    """What a person laid into an older checkpoint (notes, a git history) survives its replacement; foreign weights and
    folders that only held our own files do not. Returns the relative paths that were kept."""
    if not (folder / abi.MANIFEST_FILE).is_file():
        return set()
    problems = Problems()
    manifest, _ = inspect_checkpoint(folder, problems, hashes=False)
    if manifest is None:
        return set()
    foreign = {problem.where for problem in problems.found if problem.kind == "unexpected"}
    ours = {abi.MANIFEST_FILE, abi.TREE_FILE, abi.ADAPTER_FOLDER, abi.BACKBONE_FOLDER, *manifest.files}
    return carry_over(folder, staged, ours | foreign)


def _seal(staged: Path, manifest: HeadsManifest, carried: set[str], foreign: set[str] = frozenset()) -> None:
    """Hashes every file of ours, writes the manifest, reads the folder back strictly.

    Files in `carried` keep the manifest's entry (they were not written again); those in `foreign` are not ours.
    """
    listed = set(manifest.files) if carried else None
    files = {}
    for path in sorted(staged.rglob("*")):
        name = path.relative_to(staged).as_posix()
        if not path.is_file() or name == abi.MANIFEST_FILE or name in foreign:
            continue
        if name in carried:
            files[name] = manifest.files[name]
        elif listed is None or name == abi.TREE_FILE:
            files[name] = FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))
    sealed = manifest.model_copy(update={"files": files})
    (staged / abi.MANIFEST_FILE).write_bytes(sealed.sealed_bytes())
    problems = Problems()
    inspect_checkpoint(staged, problems, hashes=not carried)
    problems.raise_if_any("what was written does not read back as it should; the disk may be failing", staged)


def _compare_with_memory(staged: Path, state: dict[str, Tensor]) -> None:
    """The tensors on disk must be the tensors in memory, bit for bit."""
    from safetensors.torch import load_file

    written, problems = load_file(staged / abi.HEADS_FILE), Problems()
    for name in state.keys() | written.keys():
        same = name in state and name in written and torch.equal(_bits(state[name]), _bits(written[name]))
        if not same or state[name].dtype != written[name].dtype:
            problems.add(
                "hash", name, "reads back different from what was in memory", "check the disk, then save again"
            )
    problems.raise_if_any("the checkpoint was not written correctly and is discarded", staged)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _plain(value: Any) -> dict[str, Any]:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else dict(value or {})


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
