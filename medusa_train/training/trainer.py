"""The transformers Trainer with what Medusa needs of its own: exact denominators, groups, small checkpoints, stops.

Overridden, and why:
- `_get_num_items_in_batch`: every channel has its own count, so the one scalar becomes a vector, summed over the
  accumulated micro-batches and over ranks (private; `tests/training/test_trainer_hooks.py` pins it).
- `compute_loss`: sums / counts, multiplied by the number of processes because gradients are averaged over them.
- `create_optimizer`: the heads' parameters go into groups of their own.
- `save_model`, `_save_optimizer_and_scheduler`, `_load_from_checkpoint`: trainable tensors only, never the frozen
  backbone; gathered where they are sharded.
- `_save_checkpoint`: a checkpoint counts once COMPLETE lies in it, and only then older ones may go.
- `evaluate`: held-out rows, per channel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Trainer

from medusa_train.allocator import give_back_freed
from medusa_train.config.recipe import HeadsOnly, Recipe
from medusa_train.provenance import fsync_folder, write_atomic
from medusa_train.training.batches import target_counts
from medusa_train.training.finite import FiniteWatch, MicroBatch
from medusa_train.training.heldout import HeldOutRows, Replay, Scores
from medusa_train.training.losses import IGNORE
from medusa_train.training.policies import ParamGroup, channel_weights, check_cover, split_groups
from medusa_train.training.shapes import BackboneShape
from medusa_train.training.sharding import mixed_precision, of_first_rank, save_fsdp_run, shard_again, shard_on_cpu
from medusa_train.training.state import COMPLETE, RunFolder, read_tensors, trainable_tensors, write_tensors
from medusa_train.training.zero import leave_frozen_out, save_deepspeed_run

FORWARD = (
    "labels", "rows", "hidden", "input_ids", "position_ids", "attention_mask", "soft_tokens", "soft_weights",
    "seen", "middle",
)  # fmt: skip


class MedusaTrainer(Trainer):
    """Trains a `Trainee` by a recipe.

    Args:
        recipe: decides weights, groups, what counts as best.
        run: the run folder.
        heldout: held-out rows, or None.
        replay: turns held-out ranks into tokens_per_round, or None.
        shape: the backbone's, for the expected memory.
        Everything else is the Trainer's.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe,
        run: RunFolder,
        heldout: HeldOutRows | None,
        replay: Replay | None,
        shape: BackboneShape,
        **kwargs: Any,
    ) -> None:
        self.recipe, self.run, self.heldout, self.replay, self.shape = recipe, run, heldout, replay, shape
        self.groups: list[ParamGroup] = []
        self.channels = kwargs["model"].objective.channels
        self.original_rows: dict[int, Tensor] = {}
        # The library wants some data set where eval_strategy is set; `evaluate` below reads `heldout`.
        super().__init__(*args, eval_dataset=None if heldout is None else heldout.rows, **kwargs)
        if self.is_deepspeed_enabled:
            leave_frozen_out(self.model)
        self.loss_is_scaled_for_ga = True
        self._counted: Tensor | None = None
        self._totals: dict[str, Tensor] = {}
        self.watch = FiniteWatch(self.channels)

    def create_accelerator_and_postprocess(self) -> None:
        """The library's, with FSDP2 on CPU ranks as well, and sums that leave the sharded module in fp32."""
        if self.args.fsdp and (self.args.bf16 or self.args.fp16):
            self.args.fsdp_plugin_args["mixed_precision_policy"] = mixed_precision(self.args.bf16)
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled and self.args.world_size > 1:
            from accelerate.utils import FullyShardedDataParallelPlugin

            shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True

    @property
    def sharded(self) -> bool:
        """Whether no rank holds the whole model, or may not (all stages of ZeRO are treated as one)."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    # -- denominators and loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        """int64 [C]: supervised targets of every channel in the whole optimizer step, all ranks."""
        if not batch_samples:
            return None
        counts_C = torch.stack([target_counts(batch["labels"]) for batch in batch_samples]).sum(0).to(device)
        if self.args.world_size > 1:
            counts_C = self.accelerator.reduce(counts_C, reduction="sum")
        return counts_C

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """sum_c lambda_c S_c / N_c of this micro-batch, times the number of processes."""
        weights = torch.tensor(channel_weights(self.recipe, self.state.global_step, self.state.max_steps))
        # A blocking copy would wait for all that the device has still to do.
        weights = weights.to(num_items_in_batch.device, non_blocking=True)
        scale_C = weights / num_items_in_batch.clamp(min=1) * self.args.world_size
        known = None if self.args.fp16 else scale_C  # a gradient scaler multiplies what arrives
        outputs = model(**{name: inputs[name] for name in FORWARD if name in inputs}, expected=known)
        loss = (outputs["sums"] * scale_C).sum()
        self._remember(outputs, inputs, loss)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _remember(self, outputs: dict[str, Tensor], inputs: dict[str, Any], loss: Tensor) -> None:
        """Adds this micro-batch to the sums that the next log divides; nothing here waits for the device."""
        counts = target_counts(inputs["labels"])
        for name, value in (("sums", outputs["sums"]), ("hits", outputs["hits"]), ("ranked", outputs["ranked"])):
            value = value.detach().double()
            self._totals[name] = self._totals[name] + value if name in self._totals else value
        self._totals["counts"] = self._totals.get("counts", 0) + counts
        batch = MicroBatch(self.state.global_step + 1, inputs["row_M"], self._namer(inputs))
        self.watch.add(batch, loss, outputs["sums"], counts)
        if loss.device.type == "cpu":
            self.watch.check(None if self.sharded else lambda keep_M: self._sums_of(inputs, keep_M))

    def _namer(self, inputs: dict[str, Any]) -> Any:
        """A row's number in `row_M` -> file:line; batches from a cache bring no names."""
        names = inputs.get("row_ids")
        return self.train_dataset.name if names is None else names.__getitem__

    def _sums_of(self, inputs: dict[str, Any], keep_M: Tensor) -> Tensor:
        """[C]: the loss sums of this micro-batch over some of its supervised positions."""
        some = {name: inputs[name] for name in FORWARD if name in inputs}
        some["labels"] = inputs["labels"].where(keep_M.to(inputs["labels"].device), IGNORE)
        return self._autocast(self.model)(**some)["sums"]

    # -- optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The library's optimizer with the heads in groups of their own."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh:
            policy = self.recipe.policy
            multiplier = 1.0 if isinstance(policy, HeadsOnly) else policy.head_lr_multiplier
            self.groups = split_groups(optimizer, self.model if model is None else model, multiplier)
        else:
            check_cover(optimizer, (self.model if model is None else model).named_parameters())
        return optimizer

    # -- checkpoints of the run

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainable tensors only; the frozen backbone is on disk already. Every rank calls it, the first writes."""
        tensors = trainable_tensors(self.model, keep=self.args.should_save)
        if self.args.should_save:
            write_tensors(Path(output_dir or self.args.output_dir), tensors)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.watch.check_ranks(self.args.world_size)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if folder.is_dir() and (folder / COMPLETE).is_file():
            return
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # nothing goes before this one is whole
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for path in folder.rglob("*"):
                if path.is_dir():
                    fsync_folder(path)
                elif path.is_file():
                    with open(path, "rb") as handle:
                        os.fsync(handle.fileno())
            fsync_folder(folder)
            write_atomic(folder / COMPLETE, "")
            self.run.remove_old(limit or 2)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            save_fsdp_run(self, output_dir)
        elif self.is_deepspeed_enabled:
            save_deepspeed_run(self, output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.keep_original_rows()  # of an FSDP2 run: the backbone is sharded by now, and still untouched
        read_tensors(Path(resume_from_checkpoint), self.model if model is None else model)

    # -- held-out checks

    def score(self, model: torch.nn.Module | None = None) -> tuple[Scores, list[Any]]:
        """Scores all held-out rows: sums, and the spans of ranks (on every rank; sharded models score together)."""
        heldout, members = self.heldout, self._own_rows()
        model = (self.model_wrapped if self.sharded else self.model) if model is None else model
        scores = Scores.zero(self._score_names())
        nothing = np.zeros(0, np.int64)  # a rank may have no held-out row of its own
        tables = [(np.zeros((0, heldout.num_heads), np.int16), nothing, nothing)]
        was_training = model.training
        model.eval()
        if self.args.device.type == "cpu":  # a check's buffers have other sizes: they would stand beside a step's gaps
            give_back_freed()
        with self.compute_loss_context_manager(), torch.no_grad():
            for number, batch in enumerate(heldout.batches(members)):
                inputs = self._prepare_inputs(dict(batch.inputs))
                if self.original_rows:
                    inputs["original"] = self.original_rows[number].to(inputs["labels"].device)
                output = self._autocast(model)(**inputs)
                scores.add(output)
                heads = output["ranks"][-heldout.num_heads :].T.cpu().numpy()
                tables.append((heads, batch.row_M.numpy(), batch.position_M.numpy()))
        model.train(was_training)
        if self.args.device.type == "cpu":
            give_back_freed()
        ranks, rows, positions = (np.concatenate(parts) for parts in zip(*tables, strict=True))
        spans = heldout.spans(ranks, rows, positions, members)
        if members is not None:
            scores, spans = self._gather(scores, spans)
        return scores, spans

    def _autocast(self, model: torch.nn.Module) -> Any:
        """The model's forward under the run's mixed precision, also where accelerate has not wrapped it (yet)."""

        def forward(**inputs: Any) -> dict[str, Tensor]:
            with self.accelerator.autocast():
                return model(**inputs)

        return forward

    def _score_names(self) -> tuple[str, ...]:
        return tuple("lm" if name == "kl" else name for name in self.channels)

    def _gather(self, scores: Scores, spans: list[Any]) -> tuple[Scores, list[Any]]:
        from accelerate.utils import gather_object

        for name in ("sums", "counts", "ranked", "hits", "drift"):
            total = torch.from_numpy(getattr(scores, name)).to(self.args.device)
            getattr(scores, name)[...] = self.accelerator.reduce(total, reduction="sum").cpu().numpy()
        return scores, sorted(gather_object(spans), key=lambda span: span.row_id)

    @torch.no_grad()
    def keep_original_rows(self) -> None:
        """Before the first step: the untouched backbone's hidden states of held-out rows, for the drift.

        By the very module that later checks run: a sharded one rounds otherwise than the same weights unsharded.
        """
        if self.heldout is None or self.original_rows or not self.model.objective.trains_backbone:
            return
        model = self.model_wrapped if self.sharded else self.model
        model.eval()
        for number, batch in enumerate(self.heldout.batches(self._own_rows())):
            output = self._autocast(model)(**self._prepare_inputs(dict(batch.inputs)))
            self.original_rows[number] = output["hidden"].to("cpu")
        for hidden_MD in list(self.original_rows.values())[:1]:
            self.model.keep_original(hidden_MD.dtype)
        shard_again(model)

    def _own_rows(self) -> range | None:
        """The held-out rows that this rank scores; None: all (sharded models score together)."""
        if self.args.world_size == 1 or self.sharded:
            return None
        return range(self.args.process_index, len(self.heldout.rows), self.args.world_size)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Held-out loss and top-1/5/10 of every channel, drift, and the replayed tokens_per_round."""
        self.watch.check_ranks(self.args.world_size)
        scores, spans = self.score()
        found = scores.metrics(self.recipe.head_weights())
        if self.replay is not None:
            found |= self.replay(spans)
        if self.sharded:
            # Every rank scored all rows, and may round differently; what follows from it, all must do together.
            found = of_first_rank(found)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the per-channel training losses and accuracies since the last log."""
        if "loss" in logs and self._totals:
            self.watch.check_ranks(self.args.world_size)
            totals, self._totals = self._totals, {}
            if self.args.world_size > 1:
                totals = {name: self.accelerator.reduce(value, reduction="sum") for name, value in totals.items()}
            counts, ranked = totals["counts"].clamp(min=1), totals["ranked"].clamp(min=1)
            for index, name in enumerate(self.channels):
                logs[f"{name}_loss"] = float(totals["sums"][index] / counts[index])
                if totals["ranked"][index] > 0:
                    for top in (1, 5, 10):
                        logs[f"{name}_top{top}"] = float(totals["hits"][index, :top].sum() / ranked[index])
        super().log(logs, start_time)
