"""Every key of a config: its type, default, legal values and meaning, each declared here and nowhere else.

The reference page (`docs/config.md`), the JSON schema and the error messages are made from what stands here.
What one key alone must satisfy is part of its type; what several must satisfy together is in `checks.py`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True)
class Legal:
    """Says in words what a value may be, where the type alone would not say it."""

    text: str


def _whole(value: object) -> object:
    """`1e4` is a whole number; `true` and `"4"` are left as they are, for the strict type to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _matching(pattern: str) -> AfterValidator:
    def validate(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"does not match {pattern}")
        return value

    return AfterValidator(validate)


def _axis(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("neither a size nor -1")
    return value


def _first_to_last(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError("the first step is after the last")
    return value


def _flag(value: str) -> str:
    if not re.fullmatch(r"--\S+", value):
        raise ValueError("not a flag")
    return value


Count = Annotated[int, Ge(1), BeforeValidator(_whole)]
CountOrZero = Annotated[int, Ge(0), BeforeValidator(_whole)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Text = Annotated[str, MinLen(1), Legal("text, not empty")]
PathComponent = Annotated[
    str,
    _matching(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}"),
    Legal("one folder name: letters, digits and _ . + = -, at most 128, not starting with a mark but _"),
]
Address = Annotated[
    str, _matching(r"[^\s:/]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}"), Legal("text of the form host:port")
]
AxisSize = Annotated[
    int,
    BeforeValidator(_whole),
    AfterValidator(_axis),
    Legal("a whole number >= 1, or -1 for all devices that are left"),
]
StepRange = Annotated[
    tuple[Count, Count],
    Field(strict=False),
    AfterValidator(_first_to_last),
    Legal("[first, last], two steps >= 1 in ascending order"),
]
XlaFlag = Annotated[str, AfterValidator(_flag), Legal("an XLA flag, --name=value")]
DType = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A group of keys: frozen, strictly typed, no key beyond the declared ones."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


class RunConfig(Section):
    """The run: its name, its folder, its length, its randomness."""

    name: PathComponent = Field("run", description="Name of the run: its folder in `run.output_dir`.")
    output_dir: Text = Field(
        "runs",
        description="Folder of the runs, relative to the working directory (not to the YAML file).",
    )
    seed: CountOrZero = Field(0, description="Seed of the initial weights and of the order of the data.")
    steps: Count = Field(description="Optimizer updates in the whole run, those before a resume included.")


class LinearScaling(Section):
    """Positions divided by a factor (position interpolation)."""

    type: Literal["linear"] = Field(description="Positions are divided by `factor`.")
    factor: Annotated[float, Ge(1)] = Field(description="New context length over the original one.")


class Llama3Scaling(Section):
    """Llama 3.1's scaling: low frequencies divided by a factor, high ones kept, a smooth way between."""

    type: Literal["llama3"] = Field(description="Llama 3.1's scaling by frequency.")
    factor: Annotated[float, Ge(1)] = Field(description="What the low frequencies are divided by.")
    low_freq_factor: Positive = Field(
        description="Wavelengths above `original_length / low_freq_factor` positions are scaled in full."
    )
    high_freq_factor: Positive = Field(
        description="Wavelengths below `original_length / high_freq_factor` positions are kept."
    )
    original_length: Count = Field(description="Context length of the original training, in tokens.")


class YarnScaling(Section):
    """YaRN: interpolation by frequency, with the attention's temperature adjusted."""

    type: Literal["yarn"] = Field(description="YaRN's scaling by frequency.")
    factor: Annotated[float, Ge(1)] = Field(description="New context length over the original one.")
    original_length: Count = Field(description="Context length of the original training, in tokens.")
    beta_fast: Positive = Field(
        32.0, description="Dims that turn more often than this over the original length are kept."
    )
    beta_slow: Positive = Field(
        1.0, description="Dims that turn less often than this over the original length are scaled in full."
    )
    attention_factor: Positive | None = Field(
        None, description="What cosines and sines are multiplied by; null: 0.1 ln(factor) + 1."
    )


Scaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="type")]


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: Positive = Field(500000.0, description="Base of the rotary frequencies.")
    scaling: Scaling | None = Field(
        None, description="How the frequencies change for a context longer than the original; null: not at all."
    )


class ModelConfig(Section):
    """The Llama model: sizes from `model.preset`, from these keys, or both (a key given here wins)."""

    preset: Text | None = Field(
        None,
        description="Name of a shipped model whose values lie beneath the other `model` keys; null: none.",
    )
    vocab_size: Count = Field(
        description="Rows of the embedding and of the head; at least the tokenizer's size."
    )
    embed_dim: Count = Field(description="Width of the residual stream.")
    num_layers: Count = Field(description="Number of layers.")
    num_heads: Count = Field(description="Query heads of a layer.")
    num_kv_heads: Count = Field(description="Key and value heads of a layer; divides `num_heads`.")
    head_dim: Count = Field(description="Width of a head; even.")
    mlp_dim: Count = Field(description="Hidden width of the SwiGLU.")
    norm_eps: Positive = Field(1e-5, description="Added to the mean square in RMSNorm.")
    tie_embeddings: bool = Field(False, description="Whether the head is the embedding's transpose.")
    param_dtype: DType = Field(
        "float32", description="Data type that parameters and optimizer moments are kept and updated in."
    )
    compute_dtype: DType = Field(
        "bfloat16",
        description="Data type of activations and matrix products; softmax, norms, phases and loss are "
        "float32.",
    )
    rope: RopeConfig = Field(RopeConfig(), description="Rotary position embedding.")


class BatchConfig(Section):
    """The batch of a step, the same whatever the mesh."""

    sequences: Count = Field(
        description="Rows (sequences) of a step, over the whole cluster and all accumulation."
    )
    accumulation: Count = Field(
        1, description="Parts a step's batch is taken in, one after the other, to save memory."
    )


class MeshConfig(Section):
    """The device mesh: the product of its axes is the number of devices."""

    data: AxisSize = Field(1, description="Shards of the batch, with parameters replicated.")
    fsdp: AxisSize = Field(
        1, description="Shards of the batch, with parameters and optimizer state sharded too."
    )
    context: AxisSize = Field(
        1, description="Shards of the sequence; parameters and optimizer state are sharded too."
    )
    tensor: AxisSize = Field(
        1, description="Shards of the heads, of the MLP's hidden width and of the vocabulary."
    )
    simulate_devices: Literal["auto"] | Count | None = Field(
        None,
        description="Simulated CPU devices, over all processes; auto: the mesh's product; null: real "
        "devices.",
    )

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> size, in the mesh's order; at most one is -1."""
        return {"data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}

    @property
    def size(self) -> int | None:
        """Devices of the mesh; None while an axis is -1."""
        if -1 in self.axes.values():
            return None
        return self.data * self.fsdp * self.context * self.tensor


class ClusterConfig(Section):
    """How the processes of a run find each other: address, number and place, all three or none.

    With none of them: what the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, a
    Kubernetes JobSet's (see docs/checkpoints.md) or SLURM's say, else a single process.
    """

    coordinator_address: Address | None = Field(
        None, description="Address of process 0, `host:port`; null: detected from the environment."
    )
    num_processes: Count | None = Field(
        None, description="Processes of the run; null: detected from the environment."
    )
    process_id: CountOrZero | None = Field(
        None, description="This process's number, from 0; null: detected from the environment."
    )
    timeout_seconds: Count = Field(
        120,
        description="Seconds that a process waits for the others to start, and after which one that gives no sign of "
        "life counts as dead: exit code 6.",
    )


class AttentionConfig(Section):
    """How attention is computed over the shards of a sequence."""

    strategy: Literal["ring", "all_gather", "ulysses"] = Field(
        "ring",
        description="ring: keys and values travel from shard to shard; all_gather: they are gathered first; "
        "ulysses: heads are exchanged for sequence, so `mesh.context` must divide the key/value heads of a device "
        "(`model.num_kv_heads` / `mesh.tensor`).",
    )
    layout: Literal["auto", "dealt", "zigzag", "contiguous"] = Field(
        "auto",
        description="Order in which a row is dealt to the shards; auto: the one that balances the work.",
    )
    kernel: Literal["auto", "xla", "triton", "cudnn", "mosaic"] = Field(
        "auto", description="Block kernel; auto: picked by platform and shape, the log says which and why."
    )
    ulysses_degree: Count = Field(
        1,
        description="Neighbouring context shards that exchange heads for sequence (ulysses), with the ring going round "
        "such groups; divides `mesh.context` and the key/value heads of a device; 1: a ring of single shards. Strategy "
        "ring only.",
    )
    two_way: bool = Field(
        False,
        description="Whether half of a device's key/value heads travels each way round the ring, for links that send "
        "and receive at once; needs an even number of them, after `ulysses_degree`. Strategy ring only.",
    )
    unroll: bool = Field(
        False,
        description="Whether the steps of ring and all_gather stand one after the other in the program instead of in a "
        "loop: for compilers that copy what a loop carries. The program grows with the number of steps.",
    )


class MemoryConfig(Section):
    """What is recomputed or taken in parts, to save device memory."""

    remat: Literal["none", "attention_saved", "full"] = Field(
        "attention_saved",
        description="What of a layer the backward pass recomputes, attention itself never; none: nothing; "
        "attention_saved: all but attention and its q, k, v; full: all but attention.",
    )
    offload: Literal["none", "attention"] = Field(
        "none",
        description="What the backward pass needs and host memory keeps meanwhile; attention: each layer's attention "
        "output and softmax statistics. Needs a `remat`, and a GPU or TPU.",
    )
    loss_chunk: Count = Field(
        1024,
        description="Tokens of the local sequence whose logits exist at a time, in the head and the loss.",
    )
    mlp_chunk: Count | None = Field(
        None,
        description="Tokens of the local sequence that the MLP takes at a time; divides the local sequence "
        "(`sequence_length` / `mesh.context`); null, or no less than that: all.",
    )


class OptimizerConfig(Section):
    """The update: algorithm, learning rate over the run, clipping."""

    name: Literal["adamw", "sgd", "lion"] = Field(
        "adamw", description="Algorithm; sgd is plain, without momentum."
    )
    learning_rate: Positive = Field(description="Learning rate at its peak.")
    warmup_steps: CountOrZero = Field(
        0, description="Steps in which the rate rises linearly to its peak, from one such part of it."
    )
    decay: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="Shape of the fall after the warm-up, to `min_ratio` of the peak at the last step; "
        "wsd: constant, then linear in the last `decay_fraction` of the run; constant: none.",
    )
    decay_fraction: Annotated[float, Gt(0), Le(1)] = Field(
        0.2, description="Last part of the run's steps in which wsd decays."
    )
    min_ratio: Fraction = Field(0.1, description="Learning rate at the last step over the peak.")
    weight_decay: NotNegative = Field(
        0.1,
        description="Decoupled weight decay of the matrices, times the learning rate; norms are not decayed.",
    )
    clip_norm: Positive | None = Field(
        1.0, description="Global gradient norm beyond which gradients are scaled down; null: never."
    )
    beta1: BelowOne = Field(0.9, description="Decay of the first moment (adamw, lion).")
    beta2: BelowOne = Field(0.95, description="Decay of the second moment (adamw) or of the momentum (lion).")
    eps: Positive = Field(1e-8, description="Added to the second moment's root (adamw).")


class SourceConfig(Section):
    """One source of documents."""

    path: Text = Field(
        description="File, folder or glob, relative to the working directory, or a URL of them that fsspec knows "
        "(gs://…, s3://…); or python-stdlib, the source text of this Python's standard library."
    )
    weight: Positive | None = Field(
        None,
        description="Relative share of the tokens drawn from this source, each source then starting again on its own; "
        "null for all sources: no shares, every document of every source once an epoch.",
    )
    text_field: Text = Field(
        "text", description="Field that holds the text, in JSON lines, Parquet and ArrayRecord of tf.train.Example."
    )
    tokens_field: Text | None = Field(
        None,
        description="Field that holds ids of `data.tokenizer`, for documents that are tokenized already; null: they "
        "are text. Files of .npy are ids in any case.",
    )


class LengthShare(Section):
    """What part of the tokens documents of some lengths give."""

    up_to: Count | None = Field(
        description="Documents of at most this many tokens, and more than the share before it; null, in the last: any."
    )
    share: Positive = Field(description="Relative share of the tokens, of each source.")


class TokenizerTraining(Section):
    """A tokenizer trained on the run's own sources when first needed."""

    train: Literal["sentencepiece"] = Field(description="Kind of tokenizer to train.")
    vocab_size: Annotated[int, Gt(256), BeforeValidator(_whole)] = Field(
        description="Pieces, the 256 bytes and the special ones included; at most `model.vocab_size`."
    )
    sample_bytes: Count = Field(
        20_000_000, description="Bytes of text, spread over the sources, that it is trained on."
    )


class DataConfig(Section):
    """The documents, their tokens and their way into rows."""

    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False), MinLen(1)] = Field(
        description="Where documents come from: a list of `{path, weight, text_field, tokens_field}`, at least one."
    )
    tokenizer: Annotated[
        Text | TokenizerTraining,
        Legal(
            "bytes, the path of a SentencePiece .model or of a Hugging Face tokenizer.json, or "
            "{train: sentencepiece, vocab_size: N}"
        ),
    ] = Field(
        description="bytes (a token a byte), the path of a SentencePiece .model or of a Hugging Face tokenizer.json or "
        "its folder (relative to the working directory), or what to train: `{train: sentencepiece, vocab_size: N}`."
    )
    packing: Literal["concat", "best_fit", "one"] = Field(
        "best_fit",
        description="How documents fill rows; concat: end to end; best_fit: whole where they fit; one: one "
        "a row. "
        "Documents longer than a row go on in later rows.",
    )
    documents_per_row: Count | None = Field(
        None, description="Most documents in a row, for best_fit, where a kernel needs a limit; null: no limit."
    )
    length_shares: Annotated[tuple[LengthShare, ...], Field(strict=False)] = Field(
        (),
        description="Shares of the tokens by length of document, `{up_to, share}` in rising order, the last with "
        "up_to: null; each length then starts again on its own. Empty: as the documents are.",
    )
    eval_fraction: BelowOne = Field(0.0, description="Part of the documents that is held out for evaluation.")
    add_bos: bool = Field(True, description="Whether each document starts with the tokenizer's begin token.")
    add_eos: bool = Field(True, description="Whether each document ends with the tokenizer's end token.")
    prepared_dir: Text = Field(
        "prepared",
        description="Folder of tokenized data, made once and used again; relative to the working directory.",
    )
    repeat: bool = Field(
        True,
        description="Whether data that is used up starts again, in another order; false: the run ends, exit "
        "code 3.",
    )
    on_change: Literal["refuse", "restart", "continue"] = Field(
        "refuse",
        description="What a resumed run does where sources, packing, weights or row length are not its checkpoint's; "
        "restart: go to the first row of the new order; continue: take its row at the place where the old one was.",
    )
    on_bad_record: Literal["refuse", "skip"] = Field(
        "refuse",
        description="What to do with a record that cannot be read (not UTF-8, broken JSON, no such field); skip: leave "
        "it out and count it.",
    )
    prefetch: Count = Field(4, description="Batches made ahead of the step.")
    workers: CountOrZero = Field(
        0, description="Processes that make batches; 0: threads of the training process."
    )


class CheckpointConfig(Section):
    """When the state is saved and where it starts from."""

    every_steps: Count = Field(
        1000, description="Steps from a save to the next; the last step is always saved."
    )
    keep: Count = Field(3, description="Newest checkpoints kept.")
    keep_every: Count | None = Field(
        None, description="Checkpoints of every such step are kept for ever as well; null: none."
    )
    keep_best: CountOrZero = Field(
        0, description="Checkpoints with the least loss in an evaluation at their own step that are kept as well."
    )
    restore: Literal["latest", "none"] | Count = Field(
        "latest",
        description="Checkpoint of this run to go on from: the newest complete one, none, or that of a step.",
    )
    verify: bool = Field(
        True,
        description="Whether every file is read and compared with the digest made when it was written, before a "
        "restore.",
    )
    init_from: Text | None = Field(
        None,
        description="Where a run that has no checkpoint takes its weights from (those alone): a run folder, of whose "
        "checkpoints the newest; or hf:DIR, a Hugging Face Llama folder, which also sets `model` (its rope may be "
        "changed, its vocabulary padded); relative to the working directory; null: random weights.",
    )


Backend = Literal["auto", "nccl", "nvshmem", "nccl_symmetric"]


class CommunicationConfig(Section):
    """How devices talk."""

    backend: Backend = Field(
        "auto", description="Library of the collectives on GPUs; auto: the platform's own default."
    )
    xla_flags: Annotated[tuple[XlaFlag, ...], Field(strict=False)] = Field(
        (), description="XLA flags added to those of the environment, each `--name=value`."
    )


class MetricsConfig(Section):
    """What is written while training."""

    log_every: Count = Field(1, description="Steps from a line of metrics.jsonl to the next.")
    tensorboard: bool = Field(
        True, description="Whether the same numbers are written as TensorBoard event files."
    )
    profile: StepRange | None = Field(
        None,
        description="First and last step to trace with the profiler, `[first, last]`, within `run.steps`; null: none.",
    )


class EvalConfig(Section):
    """Evaluation on the held-out documents."""

    every_steps: Count | None = Field(
        None,
        description="Steps from an evaluation to the next; the last step is always evaluated too; null: never.",
    )
    sequences: Count = Field(
        16, description="Held-out rows (sequences) of an evaluation; a multiple of `mesh.data` x `mesh.fsdp`."
    )


class GuardConfig(Section):
    """What a run does about steps that are not finite, spikes, and steps that do not end."""

    max_bad_steps: CountOrZero = Field(
        0,
        description="Steps in a row without a finite loss and gradient that are skipped; one more: exit "
        "code 4.",
    )
    spike_deviations: Positive | None = Field(
        None,
        description="Standard deviations above the running mean of the logarithm of the gradient norm from which on a "
        "step is skipped as a spike; null: none is.",
    )
    step_timeout_seconds: Positive = Field(
        3600,
        description="Longest time of a step, an evaluation or a wait for a save; then every stack is shown and the run "
        "ends, exit code 6.",
    )


class Config(Section):
    """A whole run. Made by `longtrain.config.load`, which also checks the sections against each other."""

    run: RunConfig = Field(description="The run: its name, its folder, its length, its randomness.")
    model: ModelConfig = Field(description="The Llama model.")
    sequence_length: Count = Field(description="Tokens of a row (sequence), whole: before it is sharded.")
    batch: BatchConfig = Field(description="The batch of a step.")
    mesh: MeshConfig = Field(MeshConfig(), description="The device mesh.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="How the processes of a run find each other.")
    attention: AttentionConfig = Field(
        AttentionConfig(), description="Attention over the shards of a sequence."
    )
    memory: MemoryConfig = Field(MemoryConfig(), description="What is recomputed or taken in parts.")
    optimizer: OptimizerConfig = Field(description="The update.")
    data: DataConfig = Field(description="The documents, their tokens and their way into rows.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When the state is saved.")
    communication: CommunicationConfig = Field(CommunicationConfig(), description="How devices talk.")
    metrics: MetricsConfig = Field(MetricsConfig(), description="What is written while training.")
    eval: EvalConfig = Field(EvalConfig(), description="Evaluation on the held-out documents.")
    guard: GuardConfig = Field(GuardConfig(), description="What a run does about steps that go wrong.")

    @property
    def run_dir(self) -> Path:
        """The run's folder, relative to the working directory unless `run.output_dir` is absolute."""
        return Path(self.run.output_dir) / self.run.name
