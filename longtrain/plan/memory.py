"""The memory of a train step on one device, as XLA's buffer assignment lays it out, term by term.

Each term was found in the compiler's own list of live buffers (`--xla_dump_to`) and is a product of sizes that a
reader can find in the code: `model.py` says what a layer keeps, `ops/` what attention, the loss and the MLP hold
while they run. A step's peak is what always lives plus the largest of three phases, which do not overlap:

    the backward pass of a layer    everything that all layers have saved, and what one layer needs
    the loss                        the same saved things, the head and a chunk of logits
    the update                      a gradient and an update for every parameter
"""

from dataclasses import dataclass

from longtrain.plan.share import FLOAT32, Share

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 0}

KINDS = ("parameters", "optimizer", "gradients", "activations")


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
        "a layer's backward pass": _saved(share) + _layer_backward(share),
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
            "parameters",
            "copies of out_NHD and down_FD, ordered for gathering",
            reordered // share.parameter_shards * share.parameter_bytes if share.parameter_shards > 1 else 0,
        ),
        Term("activations", "the batch", 5 * FLOAT32 * share.micro_batches * share.tokens),
    ]


def _saved(share: Share) -> list[Term]:
    """What the layers keep for their backward passes, all of them: `model.REMAT_KEEPS`."""
    model = share.config.model
    layers, token, head = model.num_layers, share.compute_bytes, model.head_dim

    def all_layers(bytes_a_token: int) -> int:
        return layers * share.tokens * bytes_a_token

    stream = all_layers(token * model.embed_dim)
    heads, kv_heads = all_layers(token * head * share.heads), all_layers(token * head * share.kv_heads_held)
    statistics = all_layers(2 * FLOAT32 * share.heads)
    terms = [
        Term("activations", "saved: each layer's input", stream),
        Term("activations", "saved: attention's output", heads),
        Term("activations", "saved: attention's softmax statistics, float32", statistics),
    ]
    if share.config.memory.remat in ("attention_saved", "none"):
        terms.append(Term("activations", "saved: q, k and v", heads + 2 * kv_heads))
    return terms


def _layer_backward(share: Share) -> list[Term]:
    """What the backward pass of one layer holds at once, besides what is saved.

    XLA leaves the products that give the MLP's weight gradients for last, so that the MLP's inner activations live
    through the backward pass of attention.
    """
    model, tokens = share.config.model, share.tokens
    chunk = share.config.memory.mlp_chunk
    mlp_tokens = tokens if chunk is None else min(tokens, share.rows * chunk)
    largest_gathered = 2 * model.embed_dim * share.mlp if share.parameter_shards > 1 else 0
    return [
        Term("gradients", "the layers' gradients of this micro-batch", share.layer_parameters * share.parameter_bytes),
        Term("activations", "MLP: gate, up and their gradients", 4 * mlp_tokens * share.mlp * share.compute_bytes),
        Term("activations", "residual stream and its gradient", 3 * tokens * model.embed_dim * share.compute_bytes),
        Term("activations", "weights gathered for a layer", largest_gathered * share.compute_bytes),
        *_attention_backward(share),
    ]


def _attention_backward(share: Share) -> list[Term]:
    """What attention's backward pass holds: its inputs, the kernel's results and accumulators, the ring's buffers."""
    head, tokens = share.config.model.head_dim, share.tokens
    q, kv = tokens * share.heads * head, 2 * tokens * share.kv_heads * head
    compute, context = share.compute_bytes, share.mesh.context
    strategy = share.config.attention.strategy
    inputs = Term("activations", "attention: q, out and its gradient", 3 * q * compute)
    accumulators = 3 if context > 1 else 2
    return [
        inputs,
        Term("activations", "attention: gradient of q and its accumulators, float32", accumulators * q * FLOAT32),
        Term("activations", "attention: keys and values in their tiles", 2 * kv * compute),
        Term("activations", "attention: gradients of k and v, float32", 2 * kv * FLOAT32),
        Term("activations", f"{strategy}: keys and values in flight", 2 * kv * compute if context > 1 else 0),
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
        Term("optimizer", "an update for every parameter", share.parameters * share.parameter_bytes),
    ]
