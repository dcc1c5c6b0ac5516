"""What travels in a step, between the devices and to their hosts: by what, over what, how many bytes, how long.

The collectives are those of the program: `parallel/sharding.py` gathers weights and scatters their gradients,
`ops/ring.py`, `ops/all_gather.py` and `ops/ulysses.py` move keys and values, `ops/loss.py` and `ops/embedding.py` the
head, the table and the embeddings, and the compiler sums activations over `tensor`. `memory.offload` copies to
the host.
"""

from dataclasses import dataclass

from longtrain.plan.assumptions import Assumptions
from longtrain.plan.links import Link, between, link
from longtrain.plan.share import FLOAT32, Share


@dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step, or copies to and from the host.

    Attributes:
      what: what travels. kind: the collective. axes: the mesh axes it runs over, none where it goes to the host.
      count: how often in a step. bytes: that one device sends in a step. seconds: of a step, were nothing hidden.
      exposed: of these, the seconds that no compute hides.
    """

    what: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Pace:
    """Seconds that a device computes on one layer and micro-batch, which transfers can hide behind."""

    forward: float
    backward: float
    attention_forward: float
    attention_backward: float


def transfers(share: Share, assumed: Assumptions, pace: Pace) -> list[Transfer]:
    """All the transfers of a step that carry bytes worth counting."""
    found = [
        *_weights(share, assumed, pace),
        *attention(share, assumed, pace),
        *_tensor(share, assumed),
        *_ends(share, assumed),
        *_offloaded(share, assumed, pace),
    ]
    return [transfer for transfer in found if transfer.bytes]


def _weights(share: Share, assumed: Assumptions, pace: Pace) -> list[Transfer]:
    """A layer's weights, gathered before its forward and its backward pass; its gradients, scattered and summed.

    With remat none the gathered weights are saved. With the MLP in chunks each chunk's gradients are summed apart.
    """
    axes = ("fsdp", "context")
    over, data = link(share.mesh, axes, assumed), link(share.mesh, ("data",), assumed)
    again = 0 if share.config.memory.remat == "none" else 1
    whole = share.layer_weights * share.compute_bytes
    summed = (share.attention_weights + share.mlp_chunks * share.mlp_weights) * share.compute_bytes
    cut = summed / share.parameter_shards

    gather, scatter, reduce = over.gather(whole), over.gather(summed), data.reduce(cut)
    hidden = assumed["hidden_share"]
    waits_forward = max(0.0, gather - hidden * pace.forward)
    backward = again * gather + scatter + reduce
    waits = max(0.0, backward - hidden * pace.backward) / backward if backward else 0.0  # of a backward second

    def of(
        what: str, kind: str, axes: tuple[str, ...], times: int, sent: float, seconds: float, exposed: float
    ) -> Transfer:
        calls = share.layer_calls
        return Transfer(what, kind, axes, calls * times, calls * sent, calls * seconds, calls * exposed)

    return [
        of(
            "weights",
            "all-gather",
            axes,
            1 + again,
            (1 + again) * over.sent(whole),
            (1 + again) * gather,
            waits_forward + again * gather * waits,
        ),
        of("gradients of weights", "reduce-scatter", axes, 1, over.sent(summed), scatter, scatter * waits),
        of("gradients of weights", "all-reduce", ("data",), 1, 2 * data.sent(cut), reduce, reduce * waits),
    ]


def attention(share: Share, assumed: Assumptions, pace: Pace) -> list[Transfer]:
    """What attention moves over `context`."""
    keys, context, tensor = share.config.attention, share.mesh.context, share.mesh.tensor
    if context == 1:
        return []
    if keys.strategy == "all_gather":
        return _all_gather(share, link(share.mesh, ("context",), assumed), pace)
    found = []
    if share.ulysses_degree > 1:
        found += _ulysses(share, between(tensor, share.ulysses_degree, assumed))
    if share.ring > 1:
        ways = 2 if keys.two_way else 1
        found += _ring(share, between(tensor * share.ulysses_degree, share.ring, assumed, ways), pace)
    return found


def _kv(share: Share) -> int:
    """Numbers in a device's own keys and values of a micro-batch."""
    return 2 * share.tokens * share.kv_heads * share.config.model.head_dim


def _ring(share: Share, over: Link, pace: Pace) -> list[Transfer]:
    """n - 1 shifts of keys and values in each pass, n of their float32 gradients, the last of them beside nothing."""
    shards, kv, d_kv = over.size, _kv(share) * share.compute_bytes, _kv(share) * FLOAT32
    shift, shift_back = over.hop(kv), over.hop(d_kv)
    exposed_forward = (shards - 1) * max(0.0, shift - pace.attention_forward / shards)
    exposed_kv, exposed_d_kv = _beside(shards, shift, shift_back, pace.attention_backward / shards)

    def of(what: str, times: int, sent: float, seconds: float, exposed: float) -> Transfer:
        calls = share.layer_calls
        return Transfer(
            what, "permute", ("context",), calls * times, calls * times * sent, calls * times * seconds, calls * exposed
        )

    return [
        of("keys and values", 2 * (shards - 1), kv, shift, exposed_forward + exposed_kv),
        of("their gradients, float32", shards, d_kv, shift_back, exposed_d_kv + shift_back),
    ]


def _all_gather(share: Share, over: Link, pace: Pace) -> list[Transfer]:
    """Head by head, each beside the computing of another: but for the first gather of a pass and the last scatter."""
    heads = share.kv_heads
    kv, d_kv = (over.size * _kv(share) * width / heads for width in (share.compute_bytes, FLOAT32))
    gather, scatter = over.gather(kv), over.gather(d_kv)
    exposed_forward = gather + (heads - 1) * max(0.0, gather - pace.attention_forward / heads)
    exposed_kv, exposed_d_kv = _beside(heads, gather, scatter, pace.attention_backward / heads)

    def of(what: str, kind: str, times: int, sent: float, seconds: float, exposed: float) -> Transfer:
        calls = share.layer_calls
        return Transfer(
            what, kind, ("context",), calls * times, calls * times * sent, calls * times * seconds, calls * exposed
        )

    exposed_gather = exposed_forward + gather + exposed_kv
    return [
        of("keys and values", "all-gather", 2 * heads, over.sent(kv), gather, exposed_gather),
        of("their gradients, float32", "reduce-scatter", heads, over.sent(d_kv), scatter, exposed_d_kv + scatter),
    ]


def _beside(steps: int, kv: float, d_kv: float, compute: float) -> tuple[float, float]:
    """What is waited for of `steps` - 1 transfers each of keys and values and of their gradients, beside as many
    computations: the first has the keys of the next beside it, the last the gradients of the one before, the others
    both, on the same links. In seconds, of one transfer and one computation."""
    if steps == 1:
        return 0.0, 0.0
    both, part = max(0.0, kv + d_kv - compute), kv / (kv + d_kv)
    waits_kv = max(0.0, kv - compute) + (steps - 2) * both * part
    return waits_kv, max(0.0, d_kv - compute) + (steps - 2) * both * (1 - part)


def _ulysses(share: Share, over: Link) -> list[Transfer]:
    """Heads exchanged for sequence and back, in each pass; attention waits for both. What comes home in float32 is
    rounded to the compute dtype either way, and XLA does it before it travels."""
    q = share.tokens * share.heads * share.config.model.head_dim
    compute, statistics = share.compute_bytes, share.tokens * share.heads * FLOAT32
    messages = [
        (q + _kv(share)) * compute,  # forward, out: q, k and v
        q * compute,  # forward, home: the output
        2 * statistics,
        (2 * q + _kv(share)) * compute,  # backward, out: q, k, v and the output's gradient
        3 * statistics,
        (q + _kv(share)) * compute,  # backward, home: the gradients of q, k and v
    ]
    calls = share.layer_calls
    seconds = calls * sum(over.all_to_all(message) for message in messages)
    sent = calls * over.sent(sum(messages))
    what = "heads for sequence and back"
    return [Transfer(what, "all-to-all", ("context",), len(messages) * calls, sent, seconds, seconds)]


def _tensor(share: Share, assumed: Assumptions) -> list[Transfer]:
    """Sums over `tensor` of what its shards have of the residual stream: attention's and the MLP's outputs, forward
    and backward, and attention's once more where a layer is computed again."""
    over = link(share.mesh, ("tensor",), assumed)
    again = 0 if share.config.memory.remat == "none" else 1
    count = share.layer_calls * (4 + again)
    whole = share.tokens * share.config.model.embed_dim * share.compute_bytes
    sent, seconds = 2 * count * over.sent(whole), count * over.reduce(whole)
    return [Transfer("residual stream", "all-reduce", ("tensor",), count, sent, seconds, seconds)]


def _ends(share: Share, assumed: Assumptions) -> list[Transfer]:
    """The embedding and the head, once a micro-batch; the head is gathered once for both passes."""
    axes = ("fsdp", "context")
    over, tensor = link(share.mesh, axes, assumed), link(share.mesh, ("tensor",), assumed)
    micro, numbers = share.micro_batches, share.tokens * share.config.model.embed_dim
    head, stream = share.head_weights * share.compute_bytes, numbers * share.compute_bytes
    d_head, d_stream = share.head_weights * FLOAT32, numbers * FLOAT32

    def exposed(what: str, kind: str, axes: tuple[str, ...], count: int, sent: float, seconds: float) -> Transfer:
        return Transfer(what, kind, axes, count, count * sent, count * seconds, count * seconds)

    def summed(what: str, whole: float) -> Transfer:
        return exposed(what, "all-reduce", ("tensor",), micro, 2 * tensor.sent(whole), tensor.reduce(whole))

    return [
        exposed("head", "all-gather", axes, micro, over.sent(head), over.gather(head)),
        exposed("head's gradient, float32", "reduce-scatter", axes, micro, over.sent(d_head), over.gather(d_head)),
        exposed("embeddings", "all-to-all", axes, 2 * micro, over.sent(stream), over.all_to_all(stream)),
        summed("embeddings", stream),
        summed("hidden states' gradient, float32", d_stream),
    ]


def _offloaded(share: Share, assumed: Assumptions, pace: Pace) -> list[Transfer]:
    """Each layer's attention output and softmax statistics, to the host beside the forward pass, back beside the
    backward pass. The link to the host is no other transfer's."""
    if share.config.memory.offload == "none":
        return []
    held = share.tokens * share.heads * (share.config.model.head_dim * share.compute_bytes + 2 * FLOAT32)
    seconds = held / (assumed.device.host_bandwidth * assumed["host_efficiency"])
    hidden = assumed["host_hidden_share"]
    exposed = sum(max(0.0, seconds - hidden * compute) for compute in (pace.forward, pace.backward))
    calls = share.layer_calls
    what = "attention's output and statistics, to the host and back"
    return [Transfer(what, "copy", (), 2 * calls, 2 * calls * held, 2 * calls * seconds, calls * exposed)]
