"""What happens around the steps: progress and log lines, the best tensors kept, early stop."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from medusa_train.config.recipe import EvaluationSection
from medusa_train.console import progress, say
from medusa_train.errors import UserError
from medusa_train.provenance import write_atomic
from medusa_train.training.state import RunFolder, append_log, trainable_tensors, write_tensors


class ConsoleCallback(TrainerCallback):
    """A progress bar with the current losses, one line per held-out check, and the run's log file."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self._stack, self._job = run, ExitStack(), None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._job = self._stack.enter_context(progress("training", state.max_steps, "steps"))
            self._job.advance(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._job is not None:
            self._job.advance()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or logs is None:
            return
        append_log(self.run.log, {"step": state.global_step, **{k: v for k, v in logs.items() if _is_plain(v)}})
        if self._job is not None and "loss" in logs:
            self._job.describe(f"training, loss {logs['loss']:.3f}")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            say(f"step {state.global_step}: {describe_metrics(metrics)}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar, also after an error."""
        self._job = None
        self._stack.close()


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


def plain_metrics(metrics: dict[str, float], prefix: str = "eval_") -> dict[str, float]:
    """Held-out metrics without their prefix, the library's own (epoch) left out."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def describe_metrics(metrics: dict[str, float], prefix: str = "eval_") -> str:
    """Held-out metrics as one line: tokens per round, then loss and top-1 of every channel, then drift."""
    plain = plain_metrics(metrics, prefix)
    parts = []
    if "tokens_per_round" in plain:
        parts.append(f"held-out tokens_per_round {plain['tokens_per_round']:.3f}")
    for name in ("lm", *(f"head{j}" for j in range(64))):
        if f"{name}_loss" in plain:
            parts.append(f"{name} {plain[f'{name}_loss']:.3f} ({plain[f'{name}_top1']:.1%})")
    if "drift_kl" in plain:
        parts.append(
            f"drift CE {plain['drift_ce']:+.4f}, KL {plain['drift_kl']:.4f},"
            f" same top-1 {plain['drift_top1_agreement']:.1%}"
        )
    return ", ".join(parts)


class KeepBestCallback(TrainerCallback, ExportableState):
    """Keeps the trainable tensors of the best held-out check, and stops after so many checks without a better one.

    Its state (best value, patience used) travels with the Trainer's checkpoints, so a resumed run decides as the
    uninterrupted one would have.
    """

    def __init__(self, run: RunFolder, section: EvaluationSection, best: float | None = None, waited: int = 0) -> None:
        self.run, self.section, self.best, self.waited = run, section, best, waited
        self.trainer: Any = None

    def state(self) -> dict[str, Any]:
        """For the library's `trainer_state.json`."""
        return {"args": {}, "attributes": {"best": self.best, "waited": self.waited}}

    @property
    def sign(self) -> float:
        """+1 where more is better."""
        return 1.0 if self.section.metric == "tokens_per_round" else -1.0

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        name = self.section.metric if f"eval_{self.section.metric}" in metrics else "medusa_loss"
        sign = self.sign if name == self.section.metric else -1.0
        value = metrics[f"eval_{name}"]
        if not math.isfinite(value):
            raise UserError(f"held-out {name} is {value}", where=f"step {state.global_step}")
        if self.best is None or sign * value > sign * self.best:
            self.best, self.waited = value, 0
            if self.section.keep_best:
                self._keep(state, name, value, metrics)
            return
        self.waited += 1
        patience = self.section.early_stopping_patience
        if patience is not None and self.waited >= patience:
            if state.is_world_process_zero:
                say(f"early stop: {self.waited} held-out checks without a better {name} than {self.best:.4f}")
            control.should_training_stop = True

    def restore(self, checkpoint: Path) -> None:
        """Takes best value and patience from a checkpoint of the run (the library makes a new callback)."""
        saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]
        attributes = saved[type(self).__name__]["attributes"]
        self.best, self.waited = attributes["best"], attributes["waited"]

    def _keep(self, state: TrainerState, name: str, value: float, metrics: dict[str, float]) -> None:
        tensors = trainable_tensors(self.trainer.model, keep=state.is_world_process_zero)
        if state.is_world_process_zero:
            write_tensors(self.run.best, tensors)
            facts = {"step": state.global_step, "metric": name, "value": value, "metrics": plain_metrics(metrics)}
            write_atomic(self.run.best / "best.json", json.dumps(facts))
