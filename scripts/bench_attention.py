"""Measures attention on this machine's CPU and holds it against bars: `python scripts/bench_attention.py`.

Times are process CPU seconds of forward and backward, the least of 3 runs that take turns, so that a busy
machine disturbs all alike; wall times say nothing on simulated devices that share two cores. Unless said:
8 query heads, 2 key/value heads, head_dim 64, batch 1, one document, float32.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from longtrain import layout
from longtrain.ops import tiles
from longtrain.ops.attention import SAVED_NAMES, attention

N, K, H = 8, 2, 64


def report(bar: str, value: float, limit: float | None = None, *, at_least: bool = False) -> None:
    """One line: what is measured, the value, and the bar where there is one."""
    if limit is None:
        verdict = "(for comparison)"
    else:
        met = value >= limit if at_least else value <= limit
        verdict = f"{'>=' if at_least else '<='} {limit:<5} {'met' if met else 'MISSED'}"
    print(f"{bar:76} {value:7.3f}  {verdict}", flush=True)


def cpu_seconds(calls: dict[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """Least process CPU seconds of each call; the calls take turns."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            least[name] = min(least[name], time.process_time() - start)
    return least


def matmul(dtype: jnp.dtype) -> Callable[[], object]:
    """This machine's 2048 matrix product, float32 result: 2 * 2048**3 FLOPs."""
    x = jnp.ones((2048, 2048), dtype)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return lambda: product(x, x)


class Case:
    """Forward and backward of attention over one row, compiled ahead of time."""

    def __init__(
        self,
        length: int,
        *,
        dtype: jnp.dtype = jnp.float32,
        shards: int = 1,
        strategy: str = "ring",
        layout_name: str = "dealt",
        segments: np.ndarray | None = None,
        causal: bool = True,
        op: Callable[..., jax.Array] = attention,
    ):
        segments = np.ones(length, np.int32) if segments is None else segments
        starts = np.nonzero(np.diff(segments, prepend=-1))[0]
        positions = np.arange(length) - np.repeat(starts, np.diff(starts, append=length))
        order = layout.order(layout_name, length, shards)
        mesh = make_mesh(shards) if shards > 1 else None
        place = functools.partial(
            jax.device_put, device=NamedSharding(mesh, PartitionSpec(None, "context")) if mesh else None
        )
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(1, length, heads, H) for heads in (N, K, K, N)]
        self.arrays = [
            *(place(jax.random.normal(key, shape, dtype)) for key, shape in zip(keys, shapes, strict=True)),
            # Where every position is 0, every query sees every key of its document.
            place(jnp.asarray(positions[order] * causal, jnp.int32)[None]),
            place(jnp.asarray(segments[order], jnp.int32)[None]),
        ]

        def both(q, k, v, d_out, positions, segments):
            tokens = {"positions_BS": positions, "segments_BS": segments}
            call = functools.partial(op, **tokens, mesh=mesh, strategy=strategy, layout=layout_name)
            out, pullback = jax.vjp(call, q, k, v)
            return out, pullback(d_out)

        start = time.perf_counter()
        self.compiled = jax.jit(both).lower(*self.arrays).compile()
        self.compile_seconds = time.perf_counter() - start
        self.temp_bytes = self.compiled.memory_analysis().temp_size_in_bytes

    def __call__(self) -> object:
        return self.compiled(*self.arrays)


def make_mesh(context: int) -> Mesh:
    devices = jax.devices()[:context]
    return jax.make_mesh((context,), ("context",), axis_types=(AxisType.Auto,), devices=devices)


def dense(q, k, v, *, positions_BS, segments_BS, mesh, strategy, layout):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def without_skipping(**arguments) -> Case:
    """The same program with every tile computed and masked."""
    jax.clear_caches()

    def never(q: tiles.Bounds, kv: tiles.Bounds) -> jax.Array:
        return jnp.zeros(kv.one_segment.shape, bool)

    with mock.patch.object(tiles, "full", never), mock.patch.object(tiles, "empty", never):
        case = Case(**arguments)
    jax.clear_caches()
    return case


def bench_one_device(length: int, with_dense: bool) -> None:
    size = f"{length // 1024}K"
    calls = {"non-causal": Case(length, causal=False)} | ({"dense": Case(length, op=dense)} if with_dense else {})
    for dtype in (jnp.float32, jnp.bfloat16):
        calls |= {dtype.__name__: Case(length, dtype=dtype), f"{dtype.__name__} matmul": matmul(dtype)}
    seconds = cpu_seconds(calls)
    for dtype, limit in (("float32", 0.75), ("bfloat16", 0.55)):
        rate, peak = 7 * N * H * length**2 / seconds[dtype], 2 * 2048**3 / seconds[f"{dtype} matmul"]
        report(f"{size} {dtype}: causal FLOP rate / 2048 matmul rate", rate / peak, limit, at_least=True)
    report(f"{size}: causal / non-causal", seconds["float32"] / seconds["non-causal"], 0.56)
    if with_dense:
        limit = 4.5 if length <= 4096 else 7
        ratio = seconds["dense"] / seconds["float32"]
        report(f"{size}: jax.nn.dot_product_attention / ours", ratio, limit, at_least=True)


def bench_ring(length: int, dtype: jnp.dtype, shard_counts: tuple[int, ...]) -> None:
    size, most = f"{length // 1024}K {jnp.dtype(dtype).name}", max(shard_counts)
    cases = {"one device": Case(length, dtype=dtype)}
    cases |= {f"ring of {n}": Case(length, dtype=dtype, shards=n) for n in shard_counts}
    cases |= {f"all_gather of {most}": Case(length, dtype=dtype, shards=most, strategy="all_gather")}
    one, *others = cpu_seconds(cases).items()
    for name, seconds in others:
        report(f"{size}: {name} / one device", seconds / one[1], 1.05 if "all_gather" in name else 1.08)
    ring = cases[f"ring of {most}"]
    report(f"{size}: ring of {most}, compile seconds", ring.compile_seconds, 15)
    if dtype == jnp.float32:
        ratio = ring.temp_bytes / cases["one device"].temp_bytes
        report(f"{size}: temp bytes a device, ring of {most} / one device", ratio, 0.35)


def bench_skipping(length: int, shards: int) -> None:
    calls = {"plain": without_skipping(length=length, shards=shards), "ours": Case(length, shards=shards)}
    seconds = cpu_seconds(calls)
    ratio = seconds["plain"] / seconds["ours"]
    report(f"{length // 1024}K: ring of {shards}, every tile computed / ours", ratio, 1.8, at_least=True)


def documents(lengths: np.ndarray, total: int) -> np.ndarray:
    """Segments of a row filled with documents of these lengths, the last one cut."""
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[:total].astype(np.int32)


def bench_packed(length: int) -> None:
    rng = np.random.default_rng(0)
    segments = documents(rng.exponential(4096, length).astype(int) + 1, length)
    seconds = cpu_seconds({"one": Case(length), "packed": Case(length, segments=segments)})
    sizes = np.unique(segments, return_counts=True)[1].astype(float)
    pairs = (sizes * (sizes + 1)).sum() / (length * (length + 1))
    ratio = seconds["packed"] / seconds["one"] / pairs
    report(f"{length // 1024}K: documents of mean 4K / one document / ratio of pairs", ratio, 1.2)


def bench_balance(length: int, shards: int) -> None:
    """Lock-step imbalance: tiles of each step's busiest shard, over the pairs a shard attends at best."""
    mixes: dict[str, tuple[Callable[[np.random.Generator], np.ndarray], float]] = {
        "one document": (lambda rng: np.array([length]), 1.02),
        "exponential of mean 8K": (lambda rng: rng.exponential(8192, length).astype(int) + 1, 1.12),
        "log-normal, heavy tail": (lambda rng: rng.lognormal(7, 2, length).astype(int) + 1, 1.2),
    }
    for name in layout.LAYOUTS:
        for mix, (draw, limit) in mixes.items():
            ratios = []
            for seed in range(4):
                segments = documents(draw(np.random.default_rng(seed)), length)
                sizes = np.unique(segments, return_counts=True)[1].astype(float)
                tiles_waited_for = layout.work(name, segments, shards).max(axis=1).sum()
                pairs = (sizes * (sizes + 1)).sum() / 2
                ratios.append(tiles_waited_for * layout.tile(name, length, shards) ** 2 / (pairs / shards))
            bar = f"{length // 1024}K over {shards}: lock-step imbalance, {mix}, {name}"
            report(bar, float(np.mean(ratios)), limit if name == "dealt" else None)


def bench_remat(length: int, shards: int) -> None:
    """Two layers (projections and attention) under a scan: plain, saving by name, recomputing everything."""
    mesh = make_mesh(shards)
    order = layout.order("dealt", length, shards)
    positions = jnp.asarray(order, jnp.int32)[None]
    D = N * H
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "qkv": jax.random.normal(keys[0], (2, D, (N + 2 * K) * H)) * D**-0.5,
        "out": jax.random.normal(keys[1], (2, D, D)) * D**-0.5,
    }
    x = jax.device_put(jax.random.normal(keys[2], (1, length, D)), NamedSharding(mesh, PartitionSpec(None, "context")))

    def layer(x, weights):
        qkv = (x @ weights["qkv"]).reshape(1, length, N + 2 * K, H)
        q, k, v = jnp.split(qkv, (N, N + K), axis=2)
        out = attention(
            q, k, v, positions_BS=positions, segments_BS=jnp.ones_like(positions), mesh=mesh, layout="dealt"
        )
        return x + out.reshape(1, length, D) @ weights["out"], None

    def gradient(body):
        step = jax.jit(jax.grad(lambda w: jax.lax.scan(body, x, w)[0].sum()))
        return lambda: step(weights)

    def remat(policy=None):
        return gradient(jax.checkpoint(layer, policy=policy))

    saved = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
    seconds = cpu_seconds({"none": gradient(layer), "names": remat(saved), "full": remat()})
    size = f"{length // 1024}K over {shards}"
    report(f"{size}: remat that saves by name / no remat", seconds["names"] / seconds["none"], 1.10)
    report(f"{size}: full remat / no remat", seconds["full"] / seconds["none"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also 32K tokens, and dense attention of 8K")
    long = parser.parse_args().long
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    bench_balance(131072, 8)
    bench_one_device(4096, with_dense=True)
    bench_one_device(8192, with_dense=long)
    bench_ring(8192, jnp.float32, (4, 8))
    bench_ring(8192, jnp.bfloat16, (4, 8))
    bench_skipping(8192, 4)
    bench_remat(8192, 4)
    if long:
        bench_ring(32768, jnp.bfloat16, (4, 8))
        bench_packed(32768)


if __name__ == "__main__":
    main()
