"""The memory of a train step on one device, as XLA's buffer assignment lays it out, term by term.

Each term was found in the compiler's own list of live buffers (`--xla_dump_to`) and is a product of sizes that a
reader can find in the code: `model.py` says what a layer keeps, `ops/` what attention, the loss and the MLP hold
while they run. A step's peak is what always lives plus the largest of its phases, which do not overlap:

    the MLP's and attention's      all that the layers have saved, and what one layer needs, in one half of it
    backward passes                or in the other
    the loss                       the same saved things, the head and a chunk of logits
    the update                     a gradient and an update for every parameter

`tests/compiled_memory.yaml` records what the compiler says, of the shipped configs and of others.
"""

from dataclasses import dataclass

from longtrain.plan.share import FLOAT32, Share

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 0}

REMAT = ("none", "attention_saved", "full")
"""What the backward pass may compute again, the least first."""

KINDS = ("parameters", "optimizer", "gradients", "activations")
"""The parameters and the optimizer's moments, as the state has them; gradients, their sums and the update made of them;
everything else."""


@dataclass(frozen=True)
class Term:
    """Bytes of one thing that a device holds. `kind`: which of KINDS they are counted under; `what`: in words."""

    kind: str
    what: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """The terms that live at the step's peak, and which phase that is."""

    terms: tuple[Term, ...]
    phase: str

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, in the order of KINDS."""
        return {kind: sum(term.bytes for term in self.terms if term.kind == kind) for kind in KINDS}

    @property
    def total(self) -> int:
        return sum(term.bytes for term in self.terms)


def estimate(share: Share) -> Memory:
    """The memory of the train step of a device's share."""
    phases = {
        "the MLP's backward pass": _saved(share) + _layer(share) + _mlp_backward(share),
        "attention's backward pass": _saved(share) + _layer(share) + _attention_backward(share),
        "the loss": _saved(share) + _loss(share),
        "the update": _update(share),
    }
    phase, terms = max(phases.items(), key=lambda item: sum(term.bytes for term in item[1]))
    return Memory(tuple(term for term in _always(share) + terms if term.bytes), phase)


def _always(share: Share) -> list[Term]:
    """What lives from the first to the last moment of a step."""
    model = share.config.model
    parameters = share.parameters * share.parameter_bytes
    optimizer = share.config.optimizer.name
    # XLA gathers along the leading dim. The two matrices whose D comes last are copied into such an order, whole.
    reordered = model.num_layers * model.embed_dim * (share.heads * model.head_dim + share.mlp)
    sums = share.parameters * FLOAT32 if share.micro_batches > 1 else 0
    return [
        Term("parameters", f"parameters, {model.param_dtype}", parameters),
        Term("optimizer", f"{optimizer}'s moments", MOMENTS[optimizer] * parameters),
        Term("gradients", "sums over the micro-batches, float32", sums),
        Term(
            "activations",
            "copies of out_NHD and down_FD, ordered for gathering",
            reordered // share.parameter_shards * share.parameter_bytes if share.parameter_shards > 1 else 0,
        ),
        Term("activations", "the batch", 5 * FLOAT32 * share.micro_batches * share.tokens),
    ]


def _saved(share: Share) -> list[Term]:
    """What the layers keep for their backward passes, all of them: `model.REMAT_KEEPS`."""
    model, remat = share.config.model, share.config.memory.remat
    compute, layers = share.compute_bytes, model.num_layers
    numbers = layers * share.tokens
    stream, inner = numbers * model.embed_dim, numbers * share.mlp
    heads, kv_heads = numbers * share.heads * model.head_dim, 2 * numbers * share.kv_heads_held * model.head_dim
    # Offloaded they are in the host's memory, but for a layer's on its way there.
    kept = 1 if share.config.memory.offload == "none" else 1 / layers
    statistics = numbers * share.heads * 2 * FLOAT32
    terms = [
        Term("activations", "saved: attention's output", round(kept * heads * compute)),
        Term("activations", "saved: attention's softmax statistics, float32", round(kept * statistics)),
    ]
    if remat == "none":
        # All that any derivative reads: three float32 arrays within each norm, six within the MLP, q twice, and the
        # weights as they were gathered.
        gathered = layers * share.layer_weights if share.parameter_shards > 1 else 0
        return [
            *terms,
            Term("activations", "saved: q, k and v", (2 * heads + kv_heads) * compute),
            Term("activations", "saved: the norms' inner values, float32", 6 * stream * FLOAT32),
            Term("activations", "saved: the norms' outputs", 2 * stream * compute),
            Term("activations", "saved: the MLP's inner values", 6 * inner * compute),
            Term("activations", "saved: the gathered weights of all layers", gathered * compute),
        ]
    terms.append(Term("activations", "saved: each layer's input", stream * compute))
    if remat == "attention_saved":
        terms.append(Term("activations", "saved: q, k and v", (heads + kv_heads) * compute))
    return terms


def _layer(share: Share) -> list[Term]:
    """What the backward pass of one layer holds throughout, besides what is saved."""
    model, tokens = share.config.model, share.tokens
    stream, q = tokens * model.embed_dim, tokens * share.heads * model.head_dim
    return [
        Term("gradients", "the layers' gradients of this micro-batch", share.layer_parameters * share.parameter_bytes),
        Term("gradients", "the output head's gradient", share.head_weights // share.parameter_shards * FLOAT32),
        Term("activations", "residual stream and its gradient", 3 * stream * share.compute_bytes),
        Term("activations", "attention: q, out and its gradient", 3 * q * share.compute_bytes),
    ]


def _mlp_backward(share: Share) -> list[Term]:
    """What its MLP adds: five inner arrays, of a chunk where there is one, and two matrices gathered."""
    tokens, matrix = share.tokens // share.mlp_chunks, share.config.model.embed_dim * share.mlp
    gathered = 2 * matrix * share.compute_bytes if share.parameter_shards > 1 else 0
    return [
        Term("activations", "MLP: gate, up, their product and gradients", 5 * tokens * share.mlp * share.compute_bytes),
        Term("activations", "MLP: weights gathered", gathered),
    ]


def _attention_backward(share: Share) -> list[Term]:
    """What its attention adds: the kernel's results and accumulators, and what the strategy moves."""
    head, tokens, compute = share.config.model.head_dim, share.tokens, share.compute_bytes
    q, kv = tokens * share.heads * head, 2 * tokens * share.kv_heads * head
    rings = share.ring > 1
    seen = kv  # numbers in the keys and values that are there to be computed with
    if share.config.attention.strategy == "all_gather":  # of the whole row: of the head at work and of the next
        seen = kv * share.mesh.context * min(2, share.kv_heads) // share.kv_heads
    gathered = share.attention_weights * compute if share.parameter_shards > 1 else 0
    # The kernel's result and the ring's sum; the blockwise kernel carries another through its loop.
    d_q = 1 + rings + (share.kernel == "xla")
    return [
        Term("activations", "attention: gradient of q and its accumulators, float32", d_q * q * FLOAT32),
        Term("activations", "attention: keys and values in the kernel's order", 3 * seen * compute // 2),
        Term("activations", "attention: gradients of k and v, float32", (2 + rings) * seen * FLOAT32 // 2),
        Term("activations", "ring: keys and values in flight, and gradients", rings * kv * (2 * compute + FLOAT32)),
        Term("activations", "attention: weights gathered", gathered),
    ]


def _loss(share: Share) -> list[Term]:
    model, chunk = share.config.model, min(share.config.memory.loss_chunk, share.length)
    logits = share.rows * chunk * share.vocabulary
    stream = share.tokens * model.embed_dim * share.compute_bytes
    return [
        Term("activations", "the output head, gathered", share.head_weights * share.compute_bytes),
        Term("gradients", "the output head's gradient, float32", share.head_weights * FLOAT32),
        Term("activations", "a chunk of logits and its gradient", logits * (FLOAT32 + share.compute_bytes)),
        Term("activations", "hidden states and their gradient", 3 * stream),
    ]


def _update(share: Share) -> list[Term]:
    gradients = 0 if share.micro_batches > 1 else share.parameters * share.parameter_bytes
    return [
        Term("gradients", "gradients", gradients),
        Term("gradients", "an update for every parameter", share.parameters * share.parameter_bytes),
    ]
