"""Measures attention on this machine's CPU and holds it against bars: `python scripts/bench_attention.py`.

Times are process CPU seconds of forward and backward, the least of 3 runs that take turns, so that a busy
machine disturbs all alike. Wall times (`--idle`) mean something only where nothing else runs. Unless said:
8 query heads, 2 key/value heads, head_dim 64, batch 1, one document, float32.
"""

import argparse
import collections
import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import layout_balance
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


def report_exact(bar: str, value: object, expected: object) -> None:
    """One line for what must be just so."""
    print(f"{bar:76} {value!s:>7}  == {expected!s:<5} {'met' if value == expected else 'MISSED'}", flush=True)


Call = Callable[[], object]


def least_seconds(calls: dict[str, Call], clock: Callable[[], float], repeats: int = 3) -> dict[str, float]:
    """Least seconds of each call by this clock; the calls take turns. One that returns a number has timed itself."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            result = jax.block_until_ready(call())
            least[name] = min(least[name], result if isinstance(result, float) else clock() - start)
    return least


cpu_seconds = functools.partial(least_seconds, clock=time.process_time)
wall_seconds = functools.partial(least_seconds, clock=time.perf_counter)


def matmul(dtype: jnp.dtype) -> Callable[[], object]:
    """This machine's 2048 matrix product, float32 result: 2 * 2048**3 FLOPs."""
    x = jnp.ones((2048, 2048), dtype)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return lambda: product(x, x)


def tile_products(length: int, dtype: jnp.dtype) -> Callable[[], object]:
    """The matrix products alone of a causal row's tiles, forward and backward: what no kernel of such tiles passes."""
    tile = layout.tile("dealt", length, 1)
    visits = (count := length // tile) * (count + 1) // 2
    q_KRH, k_KSH = jnp.ones((K, N // K * tile, H), dtype), jnp.ones((K, tile, H), dtype)
    k_KHS, weights_KRS, weights_KSR = (
        jnp.ones((K, *sizes), dtype) for sizes in ((H, tile), (N // K * tile, tile), (tile, N // K * tile))
    )
    forward = (("krh,ksh->krs", q_KRH, k_KSH), ("krs,ksh->krh", weights_KRS, k_KSH))
    backward = (
        *[("ksh,krh->ksr", k_KSH, q_KRH), ("ksr,krh->ksh", weights_KSR, q_KRH)] * 2,
        ("khs,ksr->khr", k_KHS, weights_KSR),
    )

    def visit(_, sums):
        # Each product waits for the visit before it and is kept: none can be left out or shared.
        new = []
        for total, (expression, x, y) in zip(sums, (*forward, *backward), strict=True):
            x, _ = jax.lax.optimization_barrier((x, total))
            new.append(total + jnp.einsum(expression, x, y, preferred_element_type=jnp.float32))
        return new

    start = [jnp.zeros(jnp.einsum(*product).shape) for product in (*forward, *backward)]
    run = jax.jit(lambda sums: jax.lax.fori_loop(0, visits, visit, sums))
    return lambda: run(start)


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
        **options,
    ):
        segments = np.ones(length, np.int32) if segments is None else segments
        starts = np.nonzero(np.diff(segments, prepend=-1))[0]
        positions = np.arange(length) - np.repeat(starts, np.diff(starts, append=length))
        order = layout.Deal(layout_name, shards, options.get("ulysses_degree", 1)).order(length)
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
            call = functools.partial(op, **tokens, mesh=mesh, strategy=strategy, layout=layout_name, **options)
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
        calls[f"{dtype.__name__} products"] = tile_products(length, dtype)
    seconds = cpu_seconds(calls)
    for dtype, limit in (("float32", 0.75), ("bfloat16", 0.55)):
        rate, peak = 7 * N * H * length**2 / seconds[dtype], 2 * 2048**3 / seconds[f"{dtype} matmul"]
        report(f"{size} {dtype}: causal FLOP rate / 2048 matmul rate", rate / peak, limit, at_least=True)
        products = rate * seconds[dtype] / seconds[f"{dtype} products"]
        report(f"{size} {dtype}: the same of the tiles' matrix products alone", products / peak)
    report(f"{size}: causal / non-causal", seconds["float32"] / seconds["non-causal"], 0.56)
    if with_dense:
        limit = 4.5 if length <= 4096 else 7
        ratio = seconds["dense"] / seconds["float32"]
        report(f"{size}: jax.nn.dot_product_attention / ours", ratio, limit, at_least=True)


def bench_ring(length: int, dtype: jnp.dtype, shard_counts: tuple[int, ...], idle: bool) -> None:
    size, most = f"{length // 1024}K {jnp.dtype(dtype).name}", max(shard_counts)
    one = Case(length, dtype=dtype)
    rings = {f"ring of {n}": Case(length, dtype=dtype, shards=n) for n in shard_counts}
    gather = {f"all_gather of {most}": Case(length, dtype=dtype, shards=most, strategy="all_gather")}
    others = {
        f"ring of {most}, two ways": Case(length, dtype=dtype, shards=most, two_way=True),
        f"ring of {most}, unrolled": Case(length, dtype=dtype, shards=most, unroll=True),
        f"ring of {most // 2} over groups of 2": Case(length, dtype=dtype, shards=most, ulysses_degree=2),
    }
    limits = dict.fromkeys(rings, 1.08) | dict.fromkeys(gather, 1.05)
    seconds = cpu_seconds({"one device": one} | rings | gather | others)
    for name in [*rings, *gather, *others]:
        report(f"{size}: {name} / one device", seconds[name] / seconds["one device"], limits.get(name))
    ring = rings[f"ring of {most}"]
    report(f"{size}: ring of {most}, compile seconds", ring.compile_seconds, 15)
    if dtype == jnp.float32:
        report(f"{size}: temp bytes a device, ring of {most} / one device", ring.temp_bytes / one.temp_bytes, 0.35)
    if idle:
        walls = wall_seconds({"one device": one} | rings)
        for name in rings:
            report(f"{size}: {name} / one device, wall time", walls[name] / walls["one device"], 1.0)


def bench_shifts(shards: int) -> None:
    """Shifts in the program, whatever the length: of keys and values, and of their gradients."""
    tokens = jnp.zeros((1, 64 * shards), jnp.int32)
    call = functools.partial(attention, positions_BS=tokens, segments_BS=tokens, mesh=make_mesh(shards))
    arrays = [jax.ShapeDtypeStruct((1, 64 * shards, heads, H), jnp.bfloat16) for heads in (N, K, K, N)]

    def both(q, k, v, d_out):
        return jax.vjp(call, q, k, v)[1](d_out)

    def count(jaxpr, found: collections.Counter, times: int = 1) -> collections.Counter:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "ppermute":
                aval = equation.invars[0].aval
                found[str(aval.dtype), aval.shape[2]] += times
            inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
            for part in equation.params.values():
                if hasattr(part := getattr(part, "jaxpr", part), "eqns"):
                    count(part, found, inner)
        return found

    forward = count(jax.make_jaxpr(call)(*arrays[:3]).jaxpr, collections.Counter())
    backward = count(jax.make_jaxpr(both)(*arrays).jaxpr, collections.Counter()) - forward
    kv, gradient = ("bfloat16", K), ("float32", K)
    report_exact(f"ring of {shards}: shifts forward, of {K} kv heads", dict(forward), {kv: shards - 1})
    wanted = {kv: shards - 1, gradient: shards}
    report_exact(f"ring of {shards}: shifts backward, of {K} kv heads", dict(backward), wanted)


@contextlib.contextmanager
def package(python: str, length: int, shards: int) -> Iterator[Call]:
    """The `ringattention` package in a process of its own: a call that returns the CPU seconds of one run there."""
    script = Path(__file__).with_name("bench_ringattention_package.py")
    command = [python, str(script), str(length), str(shards)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{' '.join(command)} failed: {python} must have the ringattention package")

        def run() -> float:
            print("run", file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield run
        process.stdin.close()


def bench_package(python: str, length: int, shards: int, limit: float) -> None:
    with package(python, length, shards) as theirs:
        seconds = cpu_seconds({"theirs": theirs, "ours": Case(length, shards=shards)})
    ratio = seconds["theirs"] / seconds["ours"]
    report(f"{length // 1024}K over {shards}: the ringattention package / ours", ratio, limit, at_least=True)


def bench_skipping(length: int, shards: int) -> None:
    calls = {"plain": without_skipping(length=length, shards=shards), "ours": Case(length, shards=shards)}
    seconds = cpu_seconds(calls)
    ratio = seconds["plain"] / seconds["ours"]
    report(f"{length // 1024}K: ring of {shards}, every tile computed / ours", ratio, 1.8, at_least=True)


def bench_packed(length: int) -> None:
    rng = np.random.default_rng(0)
    segments = layout_balance.segments(rng.exponential(4096, length).astype(int) + 1, length)
    seconds = cpu_seconds({"one": Case(length), "packed": Case(length, segments=segments)})
    sizes = np.unique(segments, return_counts=True)[1].astype(float)
    pairs = (sizes * (sizes + 1)).sum() / (length * (length + 1))
    ratio = seconds["packed"] / seconds["one"] / pairs
    report(f"{length // 1024}K: documents of mean 4K / one document / ratio of pairs", ratio, 1.2)


def bench_balance(length: int, shards: int) -> None:
    limits = {"one document": 1.02, "exponential of mean 8K": 1.12, "log-normal, heavy tail": 1.2}
    for mix, limit in limits.items():
        ratio = layout_balance.imbalance("dealt", mix, length, shards)
        report(f"{length // 1024}K over {shards}: lock-step imbalance, {mix}, dealt", ratio, limit)


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
    parser.add_argument("--idle", action="store_true", help="nothing else runs on this machine: also wall times")
    parser.add_argument(
        "--ringattention",
        metavar="PYTHON",
        help="also against the ringattention package, which this Python has: see bench_ringattention_package.py",
    )
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for shards in (2, 4, 8):
        bench_shifts(shards)
    bench_balance(131072, 8)
    bench_one_device(4096, with_dense=True)
    bench_one_device(8192, with_dense=options.long)
    bench_ring(8192, jnp.float32, (4, 8), options.idle)
    bench_ring(8192, jnp.bfloat16, (4, 8), options.idle)
    bench_skipping(8192, 4)
    bench_remat(8192, 4)
    if options.ringattention:
        bench_package(options.ringattention, 8192, 8, 1.6)
    if options.long:
        bench_ring(32768, jnp.bfloat16, (4, 8), options.idle)
        bench_packed(32768)
        if options.ringattention:
            bench_package(options.ringattention, 32768, 8, 2.2)


if __name__ == "__main__":
    main()
