"""`fit`: a recipe becomes a checkpoint."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, set_seed

from medusa_train.checkpoint.save import check_target
from medusa_train.config.recipe import HeadsOnly, Recipe
from medusa_train.console import human_bytes, human_seconds, say
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import input_embeddings, output_projection
from medusa_train.modeling.base import Base, load_base
from medusa_train.provenance import command_line, environment, write_atomic
from medusa_train.training.announce import ShardedStartCallback, announce, dry_save, expected_memory
from medusa_train.training.arguments import training_arguments, uses_cache
from medusa_train.training.batches import BinCollator, BinDataset
from medusa_train.training.cache import CachedRows, Sight, build_cache, keep_batch
from medusa_train.training.callbacks import ConsoleCallback, KeepBestCallback, describe_metrics
from medusa_train.training.compiling import compile_blocks
from medusa_train.training.drift import DriftCallback, check_bounds_apply, check_drift
from medusa_train.training.heldout import HeldOutRows, Replay
from medusa_train.training.launch import is_main, meet
from medusa_train.training.losses import token_map_of
from medusa_train.training.memory import MemoryCallback
from medusa_train.training.policies import master_weights, prepare_backbone
from medusa_train.training.prepare import (
    Rows,
    inverse_map_of,
    load_training_rows,
    make_heads,
    objective_of,
    set_backbone_aside,
)
from medusa_train.training.shapes import shape_from_config
from medusa_train.training.sharding import of_first_rank
from medusa_train.training.soft import SoftTargets
from medusa_train.training.state import RunFolder, read_tensors
from medusa_train.training.store import store_run
from medusa_train.training.trainee import Objective, Trainee
from medusa_train.training.trainer import MedusaTrainer
from medusa_train.training.zero import fill_deepspeed


def fit(recipe: Recipe, *, replay: Replay | None = None, restart: bool = False, base: Base | None = None) -> Path:
    """Trains heads by a recipe and writes the checkpoint `recipe.output_dir`.

    Continues an interrupted run of the same recipe where it was; does nothing where it was finished.

    Args:
        replay: turns held-out ranks into {"tokens_per_round": ...}; without it the best check is the least loss.
        restart: throw the run's state away and begin anew.
        base: an already loaded backbone of the recipe (for callers that train several times; what one recipe had
            compiled stays compiled).

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: the recipe cannot be run, something else stands at its output_dir, the run folder is another
            recipe's, the loss is not finite, the ordinary head drifted too far, or is bounded without held-out rows;
            in all of these cases nothing is stored.
    """
    run, output = RunFolder.of(recipe), Path(recipe.output_dir).expanduser()
    main = is_main()
    if main:
        check_target(output)  # not only at the end, after the whole training
        run.open(recipe, restart)
    meet()
    if run.finished.is_file() and (output / "medusa_manifest.json").is_file() and not restart:
        say(f"{output}: trained by this very recipe already (--restart trains it anew)")
        return output
    started = time.monotonic()
    given, base = base, base or load_recipe_base(recipe)
    _ = base.fingerprint  # of the files as they are now, before anything is trained
    rows = load_training_rows(recipe, base)
    trainer = build_trainer(recipe, base, rows, run, replay)
    if given is None and uses_cache(recipe):
        set_backbone_aside(base, embedding_too=recipe.heads.sees == "parent")
    expected = expected_memory(trainer)
    own = {type(callback): callback for callback in trainer.callback_handler.callbacks}
    with ExitStack() as stack:
        stack.callback(own[ConsoleCallback].close)  # the bar ends also after an error
        if trainer.model.objective.trains_backbone:
            own[MemoryCallback].expected = expected
        result = _train(trainer, run, own[KeepBestCallback], expected)
    metrics = _final_metrics(trainer, run)
    if not isinstance(recipe.policy, HeadsOnly):  # what is stored may never have met a check while training
        check_drift(recipe.policy.drift, metrics, f"the weights to be stored, after step {trainer.state.global_step}")
    memory = {"expected_bytes": expected, "peak_bytes": own[MemoryCallback].peak}
    facts = {
        "seconds": round(time.monotonic() - started, 1),
        "steps": trainer.state.global_step,
        "train_loss": result.training_loss,
        "heldout": metrics,
        "memory": memory,
        "command": command_line(),
        "environment": environment(),
    }
    store_run(trainer, recipe, base, rows.manifest_hash, run, output, facts)
    if main:
        write_atomic(run.finished, json.dumps({"steps": trainer.state.global_step, "heldout": metrics}) + "\n")
        say(f"{output}: {describe_metrics(metrics, '')} in {human_seconds(facts['seconds'])}{_describe(memory)}")
    return output


def _describe(memory: dict[str, int | None]) -> str:
    if memory["peak_bytes"] is None:
        return ""
    return f", {human_bytes(memory['peak_bytes'])} at its height ({human_bytes(memory['expected_bytes'])} expected)"


def load_recipe_base(recipe: Recipe) -> Base:
    """The recipe's backbone, on the device that this process trains on."""
    section = recipe.base
    device = section.device
    if device is None and torch.cuda.is_available():
        import os

        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if (
        section.attn_implementation == "flex_attention"
        and recipe.policy.kind != "heads_only"
        and device in (None, "cpu")
    ):
        raise UserError(
            f"flex attention has no backward on a CPU, which policy.kind={recipe.policy.kind} needs",
            where="base.attn_implementation",
            allowed="sdpa, eager",
        )
    return load_base(
        section.name,
        dtype=section.dtype,
        device=device,
        quantization=section.quantization,
        revision=section.revision,
        chat_template=section.chat_template,
        attn_implementation=section.attn_implementation,
        trust_remote_code=section.trust_remote_code,
    )


def build_trainer(recipe: Recipe, base: Base, rows: Rows, run: RunFolder, replay: Replay | None) -> MedusaTrainer:
    """Everything up to the first step: heads, adapter, cache, data sets, arguments, callbacks."""
    check_bounds_apply(recipe, bool(rows.heldout))
    set_seed(int(recipe.training.get("seed", 0)))  # adapters start from random numbers
    heads = make_heads(recipe, base, rows.train)
    device = next(base.model.parameters()).device
    objective = objective_of(recipe, device)
    inverse = inverse_map_of(heads, output_projection(base.model))
    arguments = training_arguments(
        recipe, run, has_heldout=bool(rows.heldout), base_dtype=output_projection(base.model).weight.dtype
    )
    fill_deepspeed(arguments, heads.config.hidden_size)
    compile_blocks(base.model, recipe.training)
    cached_train, cached_heldout = _cached(recipe, base, rows, objective, run, inverse, arguments)
    backbone = prepare_backbone(base.model, recipe)
    if objective.trains_backbone:
        master_weights(backbone)
    projection = output_projection(backbone, len(base.tokenizer))
    sees = heads.config.sees == "parent"
    trainee = Trainee(
        heads,
        projection,
        objective,
        backbone if cached_train is None else None,
        input_embeddings(backbone) if sees and cached_train is not None else None,
    )
    check_sharding(trainee, arguments)
    heldout = None
    if rows.heldout:
        heldout = HeldOutRows(rows.heldout, objective.shifts, inverse, cached_heldout, sees)
    if cached_train is not None:
        dataset, collator = cached_train, keep_batch
    else:
        dataset = BinDataset(rows.train, recipe.data.max_length, recipe.data.packing)
        collator = BinCollator(objective.shifts, inverse, recipe.data.pad_to_multiple, _mask_builder(base.model), sees)
        say(f"{len(rows.train)} rows in {len(dataset)} bins of at most {recipe.data.max_length} tokens")
    keep_best = KeepBestCallback(run, recipe.evaluation)
    callbacks = [ConsoleCallback(run), MemoryCallback(device)]
    if not isinstance(recipe.policy, HeadsOnly):
        callbacks.append(DriftCallback(recipe.policy.drift))
    callbacks.append(keep_best)  # last: what is past a bound is never the best
    trainer = MedusaTrainer(
        model=trainee,
        args=arguments,
        train_dataset=dataset,
        data_collator=collator,
        callbacks=callbacks,
        recipe=recipe,
        run=run,
        heldout=heldout,
        replay=replay,
        shape=shape_from_config(base.model.config, base.name),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    keep_best.trainer = trainer
    return trainer


def _cached(
    recipe: Recipe, base: Base, rows: Rows, objective: Objective, run: RunFolder, inverse: Any, arguments: Any
) -> tuple[CachedRows | None, CachedRows | None]:
    """Hidden states of training and held-out rows, where the recipe asks for a cache."""
    if not uses_cache(recipe):
        return None, None
    options = recipe.policy.cache
    folder = Path(options.folder).expanduser() if options.folder else run.path / "cache"
    part = (arguments.process_index, arguments.world_size)
    found: list[CachedRows | None] = []
    for name, some in (("train", rows.train), ("heldout", rows.heldout)):
        if not some:
            found.append(None)
            continue
        build_cache(
            folder / name,
            base,
            rows.manifest_hash,
            some,
            (1, *objective.shifts) if name == "train" and recipe.loss.soft_targets else objective.shifts,
            options,
            sight=Sight(recipe.heads.sees, recipe.heads.reads_layer),
            part=part,
            description=f"{name} rows",
        )
        if part[1] > 1:
            torch.distributed.barrier()
        # Held-out targets stay token ids: a token that reduced heads do not know counts as a miss there.
        found.append(CachedRows(folder / name, inverse if name == "train" else None, [row.source for row in some]))
    if recipe.loss.soft_targets:
        tokens = None if inverse is None else token_map_of(inverse)
        projection = output_projection(base.model)
        SoftTargets(found[0], projection, tokens, recipe.loss.soft_targets, recipe.loss.soft_share)
    return found[0], found[1]


def _mask_builder(model: Any) -> Any:
    """document_ids, position_ids -> what the backbone's forward takes as attention_mask."""
    from medusa_train.modeling.masks import packed_attention_mask

    dtype = model.dtype if model.dtype.is_floating_point else torch.bfloat16

    def build(document_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor) -> Any:
        return packed_attention_mask(model, document_ids_BT, position_ids_BT, dtype)

    return build


def check_sharding(trainee: Trainee, arguments: Any) -> None:
    """FSDP2 is what is supported, and it shards tensors of one dtype together.

    Raises:
        UserError: FSDP of version 1; the backbone and the heads have different dtypes.
    """
    if not arguments.fsdp:
        return
    if int(arguments.fsdp_config.get("version", 2)) != 2:
        raise UserError("FSDP of version 1 keeps no names for its weights", fix="training.fsdp_config.version=2")
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in trainee.parameters()}
    if len(kinds) > 1:
        raise UserError(
            f"FSDP needs one dtype, this run has {', '.join(sorted(kinds))}",
            fix="base.dtype=float32 with training.bf16=true: the products run in bf16 all the same",
        )


def _train(trainer: MedusaTrainer, run: RunFolder, keep_best: KeepBestCallback, expected: int) -> Any:
    """Prints what will be trained, checks that it can be saved, then trains or goes on."""
    if trainer.args.should_save:
        run.remove_torn()
    last = run.last_whole()
    trainer.create_optimizer()
    announce(trainer, expected)
    if trainer.sharded:
        trainer.add_callback(ShardedStartCallback(trainer, run))  # weights are sharded by train()
    elif last is None:
        dry_save(trainer, run)
    if not trainer.is_fsdp_enabled:
        trainer.keep_original_rows()
    if last is not None:
        keep_best.restore(last)
        say(f"going on from {last.name.replace('checkpoint-', 'step ')}")
    result = trainer.train(resume_from_checkpoint=None if last is None else str(last))
    trainer.watch.check_ranks(trainer.args.world_size)  # the steps after the last log
    return result


def _final_metrics(trainer: MedusaTrainer, run: RunFolder) -> dict[str, float]:
    """Puts the best tensors back and scores them; {} without held-out rows."""
    if trainer.heldout is None:
        return {}
    best = run.best / "best.json"
    found = json.loads(best.read_text()) if trainer.recipe.evaluation.keep_best and best.is_file() else None
    if trainer.sharded:  # the stored checkpoint is made from the kept tensors, whole; the first rank's disk decides
        found = of_first_rank(found)
        if found is not None:
            return found["metrics"]
    elif found is not None and found["step"] != trainer.state.global_step:
        say(f"best held-out {found['metric']} {found['value']:.4f} was at step {found['step']}: kept")
        read_tensors(run.best, trainer.model)
    scores, spans = trainer.score()
    metrics = scores.metrics(trainer.recipe.head_weights())
    if trainer.replay is not None:
        metrics |= trainer.replay(spans)
    # Sharded ranks have scored all rows each, and may round differently; a bound must fail on all of them or on none.
    return of_first_rank(metrics) if trainer.sharded else metrics
