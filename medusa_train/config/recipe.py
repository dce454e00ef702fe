"""The recipe: everything that decides a training run, as one strict document.

Unknown keys are errors with the nearest name (see `load.py`). A field that does not apply to a policy does not exist
there: `policy` is a tagged union on `kind`. `training:` takes the names of transformers' TrainingArguments verbatim.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A part of the recipe; frozen, so that what was resolved is what runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BaseSection(Section):
    """The backbone: `name` is a hub id, a local folder or an alias of `config/bases.py`."""

    name: str
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Literal["8bit", "4bit"] | None = None
    chat_template: str | None = None
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = None
    trust_remote_code: bool = False
    device: str | None = Field(None, description="where the backbone lives; by default what the Trainer picks")


class DataSection(Section):
    """Rows to train on: files or hub data sets of conversations, or folders that `distill` wrote."""

    train: list[str] = Field(min_length=1)
    heldout: list[str] = []
    heldout_fraction: float = Field(0.05, ge=0, lt=1, description="split off `train` where `heldout` is empty")
    split_seed: int = 0
    max_length: int = Field(2048, ge=8, description="positions of a packed batch row")
    packing: bool = True
    pad_to_multiple: int = Field(8, ge=1)
    max_drop_fraction: float = Field(0.05, ge=0, le=1, description="more rows dropped than this stops the run")
    render: dict[str, Any] = Field({}, description="options of the renderer, see `medusa-train show --help`")


class HeadsSection(Section):
    """K heads of R residual blocks; `contract` says where their vocabulary projection comes from."""

    medusa_num_heads: int = Field(5, ge=1, le=32)
    medusa_num_layers: int = Field(1, ge=0, le=8)
    contract: Literal["own", "shared", "reduced"] = "own"
    reduced_vocab_size: int | None = Field(None, ge=2)
    sees: Literal["hidden", "parent"] = Field(
        "hidden",
        description="parent: heads also see the token before the one they guess; other programs cannot load them",
    )
    reads_layer: int | None = Field(
        None, ge=1, description="with sees: parent, a middle layer whose hidden state is read too; about two thirds up"
    )

    @model_validator(mode="after")
    def _reduced_needs_a_size(self) -> HeadsSection:
        if (self.contract == "reduced") != (self.reduced_vocab_size is not None):
            raise ValueError("reduced_vocab_size goes with `contract: reduced`, and only with it")
        if self.reads_layer is not None and self.sees == "hidden":
            raise ValueError("reads_layer goes with `sees: parent`, and only with it")
        if self.sees == "parent" and self.medusa_num_layers == 0:
            raise ValueError(
                "heads that see the parent read it in their first block: medusa_num_layers must be 1 or more"
            )
        if self.contract == "shared" and self.medusa_num_layers == 0:
            raise ValueError("shared heads without layers have nothing to train: medusa_num_layers must be 1 or more")
        return self


class CacheSection(Section):
    """The hidden-state cache: the backbone runs once over the rows, every epoch after that trains from disk."""

    enabled: bool = True
    folder: str | None = Field(None, description="by default `<output_dir>.run/cache`")
    shard_rows: int = Field(65536, ge=1, description="supervised rows per safetensors shard")
    forward_tokens: int = Field(2048, ge=1, description="tokens per backbone forward while the cache is built")


class LoraSection(Section):
    """The adapter of `joint` and `self_distill`; defaults are the Medusa-2 coordinates."""

    r: int = Field(32, ge=1)
    alpha: int = Field(16, ge=1)
    dropout: float = Field(0.05, ge=0, lt=1)
    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class RampSection(Section):
    """How the weight of the heads' loss grows: `sine` is lambda_0 sin(pi/2 s) for progress s over `fraction`."""

    shape: Literal["constant", "linear", "sine"] = "constant"
    fraction: float = Field(1.0, gt=0, le=1, description="of the steps; full weight afterwards")


class DriftSection(Section):
    """How far the ordinary head may move on held-out rows; a bound that is null is only reported."""

    max_ce_increase: float | None = Field(0.1, description="nats per token over the untouched backbone")
    max_kl: float | None = Field(None, description="mean KL(original || now), nats per token")
    min_top1_agreement: float | None = Field(None, ge=0, le=1)


class HeadsOnly(Section):
    """Medusa-1: the backbone is frozen and stays bit-identical."""

    kind: Literal["heads_only"]
    cache: CacheSection = CacheSection(enabled=False)
    init_from: str | None = Field(None, description="a checkpoint whose heads to start from")


class Joint(Section):
    """Direct Medusa-2: L_LM + lambda_0 L_medusa, backbone through an adapter or in full."""

    kind: Literal["joint"]
    adapter: Literal["lora", "qlora", "none"] = "lora"
    lora: LoraSection | None = None
    medusa_weight: float = Field(0.2, gt=0, description="lambda_0")
    head_lr_multiplier: float = Field(4.0, gt=0)
    init_from: str | None = Field(None, description="a Medusa-1 checkpoint (two stages)")
    ramp: RampSection = RampSection()
    drift: DriftSection = DriftSection()

    @model_validator(mode="after")
    def _lora_where_there_is_one(self) -> Joint:
        if self.adapter == "none" and self.lora is not None:
            raise ValueError("`lora:` does not apply to `adapter: none` (full fine-tuning)")
        return self


class SelfDistill(Section):
    """Self-distilled Medusa-2: KL(teacher || student) + lambda_0 L_medusa; the teacher is the adapter off."""

    kind: Literal["self_distill"]
    lora: LoraSection = LoraSection()
    medusa_weight: float = Field(0.01, gt=0, description="lambda_0")
    head_lr_multiplier: float = Field(4.0, gt=0)
    init_from: str | None = None
    ramp: RampSection = RampSection(shape="sine")
    drift: DriftSection = DriftSection()


Policy = Annotated[HeadsOnly | Joint | SelfDistill, Field(discriminator="kind")]


class Geometric(Section):
    """head_weights[j] = base * decay**j; the default is 0.8, 0.64, 0.512, ..."""

    base: float = Field(0.8, gt=0)
    decay: float = Field(0.8, gt=0, le=1)


class LossSection(Section):
    """Weights of the heads and the way the loss is computed."""

    head_weights: list[float] | Geometric = Geometric()
    implementation: Literal["auto", "fused", "reference", "liger"] = "auto"
    chunk_rows: int = Field(2048, ge=1, description="rows whose logits live at once")
    soft_targets: int | None = Field(
        None,
        ge=1,
        le=64,
        description="train on the backbone's own k likeliest tokens instead of the one drawn",
    )
    soft_share: float = Field(1.0, gt=0, le=1, description="their share of the target; the rest is the drawn token")
    accuracy_stride: int = Field(16, ge=1, description="one row in so many is ranked for the training accuracies")

    @field_validator("head_weights")
    @classmethod
    def _no_negative_weight(cls, weights: list[float] | Geometric) -> list[float] | Geometric:
        if isinstance(weights, list) and (not weights or min(weights) < 0 or max(weights) == 0):
            raise ValueError("head_weights must be non-negative, one per head, and not all zero")
        return weights


class EvaluationSection(Section):
    """Held-out checks while training; when they run is `training.eval_strategy` / `eval_steps`."""

    metric: Literal["tokens_per_round", "medusa_loss"] = "tokens_per_round"
    keep_best: bool = True
    early_stopping_patience: int | None = Field(None, ge=1, description="checks without a better value")
    max_rows: int | None = Field(None, ge=1, description="held-out conversations used; null takes all")
    replay_nodes: int = Field(15, ge=1, description="tree nodes of the replayed tokens_per_round")


class Recipe(Section):
    """A training run."""

    base: BaseSection
    data: DataSection
    heads: HeadsSection = HeadsSection()
    policy: Policy
    loss: LossSection = LossSection()
    training: dict[str, Any] = Field({}, description="transformers.TrainingArguments, names verbatim")
    evaluation: EvaluationSection = EvaluationSection()
    output_dir: str

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        weights, count = self.loss.head_weights, self.heads.medusa_num_heads
        if isinstance(weights, list) and len(weights) != count:
            raise ValueError(f"loss.head_weights has {len(weights)} numbers for {count} heads")
        quantized, policy = self.base.quantization, self.policy
        if self.loss.soft_targets is not None and not (isinstance(policy, HeadsOnly) and policy.cache.enabled):
            raise ValueError("loss.soft_targets needs cached hidden states: policy.cache.enabled with heads_only")
        if self.loss.soft_targets is not None and self.loss.implementation not in ("auto", "fused"):
            raise ValueError("loss.soft_targets goes with loss.implementation auto or fused")
        if isinstance(policy, Joint):
            if policy.adapter == "none" and quantized:
                raise ValueError("a quantized backbone cannot be trained in full: use adapter: qlora")
            if policy.adapter == "lora" and quantized:
                raise ValueError("LoRA on a quantized backbone is `adapter: qlora`")
            if policy.adapter == "qlora" and not quantized:
                raise ValueError("adapter: qlora needs base.quantization: 4bit (or 8bit)")
        return self

    def head_weights(self) -> list[float]:
        """lambda, resolved to K numbers: the default is 0.8, 0.64, 0.512, ... (0.8**(j+1))."""
        weights = self.loss.head_weights
        if isinstance(weights, list):
            return list(weights)
        return [weights.base * weights.decay**j for j in range(self.heads.medusa_num_heads)]

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain data, head weights as numbers: what is saved with the run and the checkpoint."""
        data = self.model_dump(mode="json")
        data["loss"]["head_weights"] = self.head_weights()
        return data
