"""How long a step takes: what is computed over how fast it is computed, and the transfers that nothing hides."""

from dataclasses import dataclass

from longtrain import flops
from longtrain.plan.assumptions import Assumptions
from longtrain.plan.memory import MOMENTS
from longtrain.plan.share import FLOAT32, Share
from longtrain.plan.traffic import Pace, Transfer, transfers

PRODUCTS_FORWARD, PRODUCTS_BACKWARD = 2, 5
"""Matrix products of attention over a pair of tiles."""

FLOAT32_BY_BFLOAT16 = 6
"""bfloat16 products that a float32 one costs where the hardware has none of its own (three parts a number)."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, which add up to `step`, and the transfers. `pace`: of one layer and micro-batch."""

    matmul: float
    attention: float
    memory: float
    exposed: float
    transfers: tuple[Transfer, ...]
    pace: Pace

    @property
    def step(self) -> float:
        return self.matmul + self.attention + self.memory + self.exposed


def estimate(share: Share, assumed: Assumptions, document_tokens: int) -> Timing:
    """The time of a step whose rows are filled with documents of `document_tokens` tokens."""
    layers, micro = share.config.model.num_layers, share.micro_batches
    peak = peak_flops(share, assumed)
    matmul = peak * assumed["matmul_efficiency"]
    bandwidth = assumed.device.memory_bandwidth * assumed["memory_efficiency"]

    # Forward 2 FLOPs a weight and token, backward 4, and what is computed again; the head's logits twice forward.
    linear_forward = 2 * share.tokens * share.layer_weights / matmul
    linear_backward = 2 * linear_forward + 2 * share.tokens * _weights_used_again(share) / matmul
    head = 8 * share.tokens * share.head_weights / matmul

    product = attention_product(share, document_tokens) * _busiest(share)
    attention_forward = PRODUCTS_FORWARD * product / (peak * assumed["attention_forward_efficiency"])
    attention_backward = PRODUCTS_BACKWARD * product / (peak * assumed["attention_backward_efficiency"])

    streamed = _bytes_streamed_forward(share) / bandwidth
    pace = Pace(
        forward=linear_forward + attention_forward + streamed,
        backward=linear_backward + attention_backward + 3 * streamed,  # once again, and twice for the gradients
        attention_forward=attention_forward,
        attention_backward=attention_backward,
    )
    moved = transfers(share, assumed, pace)
    return Timing(
        matmul=micro * (layers * (linear_forward + linear_backward) + head),
        attention=micro * layers * (attention_forward + attention_backward),
        memory=micro * layers * 4 * streamed + _bytes_of_update(share) / bandwidth,
        exposed=sum(transfer.exposed for transfer in moved),
        transfers=tuple(moved),
        pace=pace,
    )


def attention_product(share: Share, document_tokens: int) -> float:
    """FLOPs of one of attention's matrix products, of a layer and micro-batch, on a device.

    A product has width H for each pair of tokens that see each other: half of length^2 pairs a document.
    """
    pairs = share.rows * share.config.sequence_length * document_tokens / 2 / share.mesh.context
    return 2 * pairs * share.heads * share.config.model.head_dim


def step_flops(share: Share, document_tokens: int) -> float:
    """FLOPs of the whole cluster's step by the project's formula."""
    tokens = share.config.batch.sequences * share.config.sequence_length
    return flops.flops_of_sums(share.config.model, tokens, tokens * document_tokens)


def peak_flops(share: Share, assumed: Assumptions) -> float:
    """FLOP/s that matrix products could reach at most in the compute dtype."""
    device = assumed.device
    return device.peak(share.config.model.compute_dtype) or device.peak_flops["bfloat16"] / FLOAT32_BY_BFLOAT16


def _weights_used_again(share: Share) -> int:
    """Weights of a layer whose products the backward pass computes again: see `model.REMAT_KEEPS`.

    Of attention's output projection too: the MLP's input is the residual stream behind it.
    """
    model = share.config.model
    out = model.embed_dim * model.head_dim * share.heads
    gate_and_up = 2 * share.mlp_weights // 3
    remat = share.config.memory.remat
    if remat == "none":
        return gate_and_up if share.mlp_chunks > 1 else 0
    return out + gate_and_up + (share.attention_weights - out if remat == "full" else 0)


def _busiest(share: Share) -> float:
    """Attention work of a ring's busiest shard over the mean, for one document a row: 1 in a balanced layout."""
    attention, context = share.config.attention, share.mesh.context
    shards = context if attention.strategy == "all_gather" else share.ring
    return (2 * shards - 1) / shards if attention.layout == "contiguous" else 1.0


def _bytes_streamed_forward(share: Share) -> float:
    """Bytes that a layer's forward pass reads and writes outside its matrix products.

    By width: two norms and two residual sums (10 D), rope and the order attention wants (4 H a head), SwiGLU (3 F).
    """
    model = share.config.model
    heads = 4 * model.head_dim * (share.heads + share.kv_heads)
    return share.tokens * share.compute_bytes * (10 * model.embed_dim + heads + 3 * share.mlp)


def _bytes_of_update(share: Share) -> float:
    """Bytes that the optimizer and the sums over micro-batches read and write in a step."""
    moments = MOMENTS[share.config.optimizer.name]
    # Parameter and moments in and out; the gradient read for its norm and for the update; the update out and in.
    update = share.parameters * share.parameter_bytes * (2 * (1 + moments) + 4)
    sums = 3 * FLOAT32 * share.parameters * share.micro_batches if share.micro_batches > 1 else 0
    return update + sums
