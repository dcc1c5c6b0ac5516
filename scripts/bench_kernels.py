"""Measures the GPU block kernels on one GPU: `python scripts/bench_kernels.py`.

Three tables, TFLOP/s and milliseconds of bfloat16 attention with 32 query and 8 key/value heads of 128, one document a
row, forward and forward + backward; the least of some runs that take turns.

    whole       each kernel over a whole row, beside cuDNN called plainly (`jax.nn.dot_product_attention`)
    ring        a ring of n shards in turn on this one device, every step of every shard, over one call of the row:
                what the steps' size, the masks and the merging cost, without any transfer
    lengths     cuDNN over half of the keys by length against all of them: 0.5 where it skips what lies beyond the
                length, 1 where it does not. The `cudnn` kernel's ring relies on it

FLOPs are those of the visible pairs: 4 H a pair and query head forward, and 2.5 times that again backward.

Nobody has run it on a GPU yet. `--dry-run` runs the same code on any device, at a toy size and with the kernels that
the device has: its numbers mean nothing.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from longtrain import layout
from longtrain.ops import kernels, ring
from longtrain.ops.attention import attention
from longtrain.ops.kernels import Kernel, cudnn_internals
from longtrain.ops.kernels.workload import Settings, Workload, interpreted, interpreting
from longtrain.ops.tiles import Tokens

N, K, H = 32, 8, 128
LAYOUTS = {"cudnn": "zigzag"}
"""What a ring of a kernel is dealt by, `dealt` where nothing stands here."""

Call = Callable[[], object]


def seconds(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Least wall seconds of each call; the calls take turns."""
    for call in calls.values():
        jax.block_until_ready(call())
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def flops(length: int, *, backward: bool) -> float:
    return length * (length + 1) / 2 * N * 4 * H * (3.5 if backward else 1)


def serving(length: int, shards: int, names: tuple[str, ...]) -> Iterator[str]:
    """The kernels that serve a ring of this size here; says of the others why not."""
    for name in names:
        work = Workload.on(
            jax.devices()[0],
            dtype="bfloat16",
            head_dim=H,
            q_heads=N,
            kv_heads=K,
            tokens=length,
            context=shards,
            tensor=1,
            strategy="ring",
            layout="auto",
            one_document=True,
        )
        if limit := kernels.limits(name, work):
            print(f"{name:12} left out: {limit}", flush=True)
        else:
            yield name


def inputs(length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q_BSNH, k_BSKH and v_BSKH of one row."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (1, length, heads, H), jnp.bfloat16) for key, heads in zip(keys, (N, K, K), strict=True)
    )


def tokens(length: int) -> Tokens:
    return Tokens(jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32))


def forward_and_backward(call: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> tuple[Call, Call]:
    """Two programs of no arguments: call(*arrays), and its gradients by way of a cotangent of ones."""

    @jax.jit
    def both(*arrays: jax.Array) -> object:
        out, pullback = jax.vjp(call, *arrays)
        return pullback(jnp.ones_like(out))

    return functools.partial(jax.jit(call), *arrays), functools.partial(both, *arrays)


def whole(length: int, names: tuple[str, ...], repeats: int, *, plainly: bool) -> None:
    arrays, row = inputs(length), tokens(length)
    calls: dict[str, tuple[Call, Call]] = {}
    for name in serving(length, 1, names):
        call = functools.partial(
            attention, positions_BS=row.positions, segments_BS=row.segments, kernel=name, one_document=True
        )
        calls[name] = forward_and_backward(call, arrays)
    if plainly:
        plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        calls["cuDNN plainly"] = forward_and_backward(plain, arrays)
    for index, title in enumerate(("forward", "forward + backward")):
        for name, took in seconds({name: pair[index] for name, pair in calls.items()}, repeats).items():
            rate = flops(length, backward=bool(index)) / took / 1e12
            print(f"{length:8,} tokens  {title:20} {name:16} {took * 1e3:10.2f} ms {rate:8.1f} TFLOP/s", flush=True)


def simulated_ring(name: str, length: int, shards: int) -> Call:
    """Forward and backward of every step of every shard, one after the other, as `ops/ring.py` calls the kernel."""
    deal = LAYOUTS.get(name, "dealt")
    kernel = Kernel(
        name,
        Settings(
            scale=H**-0.5,
            tile=layout.tile(deal, length, shards),
            block=layout.block(deal, length, shards),
            interpret=interpreting(),
        ),
    )
    order = np.asarray(layout.order(deal, length, shards))
    q_BSNH, k_BSKH, v_BSKH = (x[:, order] for x in inputs(length))
    row = Tokens(*(x[:, order] for x in tokens(length)))
    T = length // shards
    # The shards' blocks, stacked in front.
    q_SBKGTH = q_BSNH.reshape(1, shards, T, K, N // K, H).transpose(1, 0, 3, 4, 2, 5)
    k_SBKTH, v_SBKTH = (x.reshape(1, shards, T, K, H).transpose(1, 0, 3, 2, 4) for x in (k_BSKH, v_BSKH))
    tokens_SBT = Tokens(*(x.reshape(1, shards, T).transpose(1, 0, 2) for x in row))

    @jax.jit
    def step_forward(q, k, v, mine, theirs, result):
        return ring.merge(result, kernel.forward(q, k, v, mine, theirs))

    @jax.jit
    def first_forward(q, k, v, mine, theirs):
        return kernel.forward(q, k, v, mine, theirs)

    step_backward = jax.jit(kernel.backward)

    def of(shard: int, arrays: Tokens) -> Tokens:
        return Tokens(*(x[shard] for x in arrays))

    def run() -> object:
        last: object = None
        for shard in range(shards):
            q, mine = q_SBKGTH[shard], of(shard, tokens_SBT)
            result = first_forward(q, k_SBKTH[shard], v_SBKTH[shard], mine, mine)
            blocks = [(shard - step) % shards for step in range(1, shards)]
            for block in blocks:
                result = step_forward(q, k_SBKTH[block], v_SBKTH[block], mine, of(block, tokens_SBT), result)
            out, stats = result
            delta = (out * out).sum(axis=-1)  # d_out is out: any will do
            for block in [shard, *blocks]:
                last = step_backward(
                    *(q, k_SBKTH[block], v_SBKTH[block], out.astype(q.dtype), stats, delta),
                    *(mine, of(block, tokens_SBT)),
                )
        return last

    return run


def rings(length: int, shards: int, names: tuple[str, ...], repeats: int) -> None:
    arrays, row = inputs(length), tokens(length)
    for name in serving(length, shards, names):
        call = functools.partial(
            attention, positions_BS=row.positions, segments_BS=row.segments, kernel=name, one_document=True
        )
        took = seconds(
            {"ring": simulated_ring(name, length, shards), "one call": forward_and_backward(call, arrays)[1]}, repeats
        )
        ratio = took["ring"] / took["one call"]
        print(f"{length:8,} tokens  {shards} shards in turn  {name:12} {took['ring'] * 1e3:10.2f} ms", end="")
        print(f"  over one call {took['one call'] * 1e3:10.2f} ms  {ratio:6.3f}", flush=True)


def lengths(length: int, repeats: int) -> None:
    q_BSNH, k_BSKH, v_BSKH = inputs(length)
    q, k, v = (x.swapaxes(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
    all_queries = jnp.full((1,), length, jnp.int32)

    @jax.jit
    def both(q, k, v, keys):
        how = {"scale": H**-0.5, "causal": False}
        out, lse = cudnn_internals.forward(q, k, v, all_queries, keys, **how)
        return cudnn_internals.backward(q, k, v, out, lse, out, all_queries, keys, **how)

    some = {part: jnp.full((1,), length // part, jnp.int32) for part in (1, 2)}
    took = seconds({str(part): functools.partial(both, q, k, v, keys) for part, keys in some.items()}, repeats)
    print(f"{length:8,} tokens  half of the keys by length, over all: {took['2'] / took['1']:6.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dry-run", action="store_true", help="any device, a toy size, numbers without meaning")
    options = parser.parse_args()
    device = jax.devices()[0]
    if options.dry_run:
        print(f"DRY RUN on {device.device_kind}: the numbers mean nothing", flush=True)
        with interpreted():
            whole(256, ("xla", "triton"), 1, plainly=False)
            rings(512, 2, ("xla", "triton"), 1)
        return 0
    if device.platform != "gpu":
        print(f"this measures GPU kernels and needs one: jax's first device is {device.device_kind}", file=sys.stderr)
        return 2
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    for length in options.tokens:
        whole(length, ("triton", "cudnn"), options.repeats, plainly=True)
    for length in options.tokens:
        rings(length, options.shards, ("triton", "cudnn"), options.repeats)
    for length in options.tokens:
        lengths(length, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
