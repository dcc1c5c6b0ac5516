"""Attention against dense float64 attention, on meshes of 1 to 8 simulated devices, and what its program holds.

Tiles are shrunk to 8 tokens here, so that rows of a hundred tokens have many of them.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import reference
import steps
from longtrain import layout
from longtrain.ops.attention import SAVED_NAMES, attention
from longtrain.ops.kernels import xla

AXES = ("data", "fsdp", "context", "tensor")
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(layout, "TILE", 8)
    monkeypatch.setattr(xla, "SMALLEST_TILE", 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: mesh, strategy with its options, layout, shape and dtype."""

    name: str
    mesh: tuple[tuple[str, int], ...] = ()
    strategy: str = "ring"
    layout: str = "dealt"
    length: int = 96
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: type = jnp.float32
    ulysses_degree: int = 1
    two_way: bool = False
    unroll: bool = False

    @functools.cached_property
    def order(self) -> np.ndarray:
        return layout.order(self.layout, self.length, dict(self.mesh).get("context", 1) // self.ulysses_degree)

    @functools.cached_property
    def call(self):
        """attention(q, k, v, positions_BS=, segments_BS=), arrays in the layout's order."""
        mesh = make_mesh(**dict(self.mesh)) if self.mesh else None
        options = {"ulysses_degree": self.ulysses_degree, "two_way": self.two_way, "unroll": self.unroll}
        return functools.partial(attention, mesh=mesh, strategy=self.strategy, layout=self.layout, **options)

    @functools.cached_property
    def compiled(self):
        """(q, k, v, d_out, positions, segments) -> (out, dq, dk, dv), arrays in the layout's order."""

        def both(q, k, v, d_out, positions, segments):
            call = functools.partial(self.call, positions_BS=positions, segments_BS=segments)
            out, pullback = jax.vjp(call, q, k, v)
            return out, *pullback(d_out)

        return jax.jit(both)

    def __call__(self, rows: "Rows") -> dict[str, np.ndarray]:
        arrays = (rows.q, rows.k, rows.v, rows.d_out, rows.positions, rows.segments)
        results = self.compiled(*(x[:, self.order] for x in arrays))
        back = np.argsort(self.order)
        return {name: np.asarray(x)[:, back] for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True)}


def make_mesh(**sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def case(name: str, strategy: str = "ring", layout: str = "dealt", *, mesh: str = "", **rest) -> Case:
    sizes = tuple((axis, int(size)) for axis, size in (part.split("=") for part in mesh.split()))
    return Case(name, sizes, strategy, layout, **rest)


CASES = [
    case("one device, odd length, groups of 3", layout="contiguous", length=77, heads=(3, 1), head_dim=96),
    case("ring 2, no groups", "ring", "zigzag", mesh="context=2", heads=(2, 2), head_dim=128),
    case("ring 4, two ways", mesh="context=4", two_way=True),
    case("ring 8, one kv head", "ring", "contiguous", mesh="context=8", length=88, heads=(4, 1)),
    case("all_gather 4, no even block", "all_gather", mesh="context=4", length=100),
    case("ulysses 2", "ulysses", "zigzag", mesh="context=2"),
    case("all axes", "ring", mesh="data=2 context=2 tensor=2"),
    case("ring 2 over groups of 2, unrolled", "ring", "zigzag", mesh="context=4", ulysses_degree=2, unroll=True),
    case("one device, bfloat16", layout="contiguous", dtype=jnp.bfloat16),
    case("ring 2, fewer kv heads than tensor shards, bfloat16", mesh="context=2 tensor=4", dtype=jnp.bfloat16),
]

MORE_CASES = [
    case("one device", layout="contiguous"),
    case("rows over data and fsdp", mesh="data=2 fsdp=2"),
    case("ring 2, fewer kv heads than tensor shards", mesh="context=2 tensor=4", heads=(4, 2)),
    case("ring 2, one kv head on 4 tensor shards", mesh="context=2 tensor=4", heads=(4, 1)),
    *[
        case(f"ring {name} {mesh} degree {degree}", "ring", name, mesh=mesh, heads=(8, 4), ulysses_degree=degree)
        for name in layout.LAYOUTS
        for mesh, degree in (("context=2", 2), ("context=4", 4), ("context=8", 2), ("context=8", 4))
    ],
    case("ring 4 over groups of 2, two ways", mesh="context=8", heads=(8, 4), ulysses_degree=2, two_way=True),
    case("ring 2 over groups of 2, odd blocks", mesh="context=4", length=100, ulysses_degree=2),
    case("groups of 2 and all axes", mesh="fsdp=2 context=4", ulysses_degree=2, two_way=True, heads=(8, 4)),
    case("groups of 2 and tensor", mesh="context=4 tensor=2", heads=(8, 4), ulysses_degree=2, dtype=jnp.bfloat16),
    *[
        case(f"ring {mesh}, two ways, unroll {unroll}", mesh=mesh, heads=(8, 4), two_way=True, unroll=unroll)
        for mesh in ("context=2", "context=4", "context=8")
        for unroll in (False, True)
    ],
    case("ring 4, two ways, bfloat16", mesh="context=4", two_way=True, dtype=jnp.bfloat16),
    case("all_gather 4, unrolled, four heads", "all_gather", mesh="context=4", heads=(8, 4), unroll=True),
    case("all_gather 8, one head", "all_gather", mesh="context=8", heads=(4, 1)),
    *[
        case(
            f"{strategy} {name} {mesh} {jnp.dtype(dtype).name}",
            strategy,
            name,
            mesh=mesh,
            heads=(8, 8) if strategy == "ulysses" else (4, 2),
            dtype=dtype,
        )
        for strategy in ("ring", "all_gather", "ulysses")
        for name in layout.LAYOUTS
        for mesh in ("context=2", "context=4", "context=8", "fsdp=2 context=2 tensor=2", "context=4 tensor=2")
        for dtype in (jnp.float32, jnp.bfloat16)
    ],
]


@dataclasses.dataclass
class Rows:
    """The arrays of a call, in document order; padding holds NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    positions: np.ndarray
    segments: np.ndarray

    def reference(self) -> reference.Answer:
        arrays = (self.q, self.k, self.v, self.d_out)
        return reference.attention(*arrays, positions_BS=self.positions, segments_BS=self.segments)


def packed(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of documents of these lengths; a negative length is padding."""
    positions = np.concatenate([np.arange(abs(n)) for n in lengths])
    numbers = np.cumsum([n > 0 for n in lengths]) * [n > 0 for n in lengths]
    return positions, np.repeat(numbers, np.abs(lengths))


def token_rows(length: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows of every kind: name -> (positions, segments)."""
    S, eighth = length, length // 8
    tail = S - 8 * eighth
    rng = np.random.default_rng(length)
    cuts = np.diff([0, *np.sort(rng.choice(np.arange(1, S), 6, replace=False)), S])
    positions, segments = packed(*cuts)
    rows = {
        "one document": packed(S),
        "documents": (positions, segments),
        "one token each": packed(*[1] * S),
        "ends on edges": packed(*[eighth] * 8, *[tail] * (tail > 0)),
        "ends one before edges": packed(eighth - 1, *[eighth] * 7, 1, *[tail] * (tail > 0)),
        "ends one after edges": packed(eighth + 1, *[eighth] * 6, eighth - 1, *[tail] * (tail > 0)),
        "padding at the end": packed(S // 2, S // 3, S // 2 + S // 3 - S),
        "padding at the start": packed(S // 3 - S, S // 3 - 1, 1),
        "padding between": packed(5, -eighth, S // 2, -3, 1, -1, 1, eighth + S // 2 + 11 - S),
        "padding after each document": packed(*[7, -1] * (S // 8), *[tail] * (tail > 0)),
        "padding alone": packed(-S),
        "whole shards of padding": packed(eighth, -4 * eighth, eighth + 1, 1 - 2 * eighth - tail),
        "segments that fall": (positions, segments.max() + 1 - segments),
        "segments that alternate": (np.arange(S), np.arange(S) % 3 + 1),
        "positions that fall": (np.arange(S)[::-1], np.ones(S, int)),
        "one position": (np.zeros(S, int), np.repeat([1, 2], [S // 2, S - S // 2])),
    }
    assert all(len(p) == len(s) == S for p, s in rows.values())
    return rows


def make_rows(case: Case) -> Rows:
    rng = np.random.default_rng(0)
    tokens = token_rows(case.length)
    (N, K), H, B, S = case.heads, case.head_dim, len(tokens), case.length
    q, d_out = rng.standard_normal((2, B, S, N, H))
    k, v = rng.standard_normal((2, B, S, K, H))
    positions, segments = (np.stack(x) for x in zip(*tokens.values(), strict=True))
    padding = segments == 0
    for x in (q, k, v, d_out):
        x[padding] = np.nan
    return Rows(
        *(x.astype(case.dtype) for x in (q, k, v, d_out)), positions.astype(np.int32), segments.astype(np.int32)
    )


def errors(got: np.ndarray, answer: reference.Answer, name: str) -> np.ndarray:
    """Of each row, the largest error as a part of the summed magnitudes."""
    error = np.abs(got.astype(np.float64) - answer.values[name])
    magnitude = answer.magnitudes[name]
    assert (error[magnitude == 0] == 0).all(), f"{name} is not 0 where nothing is seen"
    return (error / np.where(magnitude == 0, 1, magnitude)).max(axis=(1, 2, 3))


def assert_exact(case: Case) -> None:
    rows = make_rows(case)
    answer = rows.reference()
    for name, got in case(rows).items():
        assert got.dtype == case.dtype
        assert np.isfinite(got.astype(np.float32)).all(), f"{name} holds NaN"
        error = errors(got, answer, name)
        row = list(token_rows(case.length))[int(np.argmax(error))]
        assert error.max() <= TOLERANCE[case.dtype], f"{name} of row {row!r}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_dense_attention(case):
    assert_exact(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_attention_is_dense_attention_for_every_strategy_layout_and_mesh(case):
    assert_exact(case)


@jax.jit
def dense_float32(q, k, v, d_out, positions, segments):
    def dense(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        seen = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        scores = jnp.einsum("bikh,bjkh->bkij", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
        return jnp.einsum("bkij,bjkh->bikh", weights, v)

    out, pullback = jax.vjp(dense, q, k, v)
    return out, *pullback(d_out)


EXTREME = [
    case("one device", layout="contiguous", length=512, heads=(2, 1)),
    case("ring 4", mesh="context=4", length=512, heads=(2, 1)),
]


@pytest.mark.parametrize("case", EXTREME, ids=lambda case: case.name)
def test_scores_of_any_size_are_as_exact_as_dense_float32_attention(case, monkeypatch, times=2):
    monkeypatch.setattr(layout, "TILE", 64)
    monkeypatch.setattr(xla, "SMALLEST_TILE", 64)
    rng = np.random.default_rng(0)
    S, H, names = case.length, case.head_dim, ("rising", "falling", "random", "equal")
    q, d_out = rng.standard_normal((2, 4, S, 2, H)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, S, 1, H)).astype(np.float32)
    # The running maximum climbs or falls by 150 from each eighth of the row to the next, for every query.
    q[:2, :, :, -1] = np.sqrt(H)
    k[0, :, :, -1] = 150 * (np.arange(S) * 8 // S)[:, None]
    k[1] = k[0, ::-1]
    # Random scores of up to 1e4, and scores that are all exactly 1e4.
    q[2] *= 1e4 / np.sqrt(H)
    q[3], k[3] = 1e4 / np.sqrt(H), 1
    rows = Rows(q, k, v, d_out, *(np.stack([x] * 4).astype(np.int32) for x in packed(S // 2 + 3, S // 2 - 3)))
    answer = rows.reference()
    dense = dense_float32(q, k, v, d_out, rows.positions, rows.segments)
    for (name, got), single in zip(case(rows).items(), dense, strict=True):
        limit = np.maximum(TOLERANCE[jnp.float32], times * errors(np.asarray(single), answer, name))
        error = dict(zip(names, errors(got, answer, name) / limit, strict=True))
        assert max(error.values()) <= 1, f"{name}: {error}"


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == jnp.float32], ids=lambda case: case.name)
def test_documents_do_not_see_each_other_by_a_bit(case):
    """Law 2: other tokens in one document leave every bit of the others' outputs and gradients."""
    rows = make_rows(case)
    before = case(rows)
    changed = rows.segments == 2
    changed[list(token_rows(case.length)).index("segments that alternate")] = False
    rng = np.random.default_rng(1)
    for x in (rows.q, rows.k, rows.v, rows.d_out):
        x[changed] = 3 * rng.standard_normal(x[changed].shape)
    for name, after in case(rows).items():
        np.testing.assert_array_equal(after[~changed], before[name][~changed], err_msg=name)
        assert (after[changed] != before[name][changed]).any(), name


def plain_tokens(B: int, S: int) -> dict[str, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    return {"positions_BS": positions, "segments_BS": jnp.ones((B, S), jnp.int32)}


def test_the_answer_is_the_same_in_and_out_of_jit_and_from_sharded_arrays():
    case = CASES[1]
    rows = make_rows(case)
    tokens = {"positions_BS": rows.positions[:, case.order], "segments_BS": rows.segments[:, case.order]}
    qkv = [x[:, case.order] for x in (rows.q, rows.k, rows.v)]
    expected = case(rows)["out"][:, case.order]
    np.testing.assert_allclose(case.call(*qkv, **tokens), expected, rtol=1e-6, atol=1e-6)
    mesh = case.call.keywords["mesh"]
    sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "context"))) for x in qkv]
    out = case.call(*sharded, **tokens)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, "context")), out.ndim)


@pytest.mark.parametrize("placed", [False, True], ids=["anywhere", "cut over the mesh"])
def test_a_mesh_of_explicit_axes_gives_the_same(placed: bool):
    """What jax.make_mesh gives unless told otherwise; the types of arrays that are placed on it name its axes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 32, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    tokens = plain_tokens(2, 32)

    def squares(mesh: Mesh | None, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, **tokens, mesh=mesh)
        return jnp.sum(out**2), out

    def both(mesh: Mesh | None, *qkv: jax.Array) -> tuple:
        return jax.jit(jax.grad(functools.partial(squares, mesh), (0, 1, 2), has_aux=True))(*qkv)

    expected = both(None, q, k, v)
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    cut = NamedSharding(mesh, PartitionSpec("data", "context"))
    found = both(mesh, *(jax.device_put(x, cut) if placed else x for x in (q, k, v)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)
    if placed:
        with jax.set_mesh(mesh):
            out = squares(mesh, *(jax.device_put(x, cut) for x in (q, k, v)))[1]
        np.testing.assert_allclose(out, expected[1], rtol=1e-5, atol=1e-5)


def test_scale_multiplies_the_scores():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 1, 64)).astype(np.float32)
    tokens = plain_tokens(1, 16)
    answer = reference.attention(q, k, v, q, **tokens, scale=0.5)
    np.testing.assert_allclose(attention(q, k, v, **tokens, scale=0.5), answer.values["out"], atol=1e-5)


# --- What the program holds -----------------------------------------------------------------------------------------


def equations(jaxpr, times: int = 1):
    """Every equation of a program with the number of times it runs (loops of unknown length once)."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from equations(part, inner)


def count(jaxpr, primitive: str) -> int:
    return sum(times for equation, times in equations(jaxpr) if equation.primitive.name == primitive)


def arguments(B: int, S: int, N: int, K: int, H: int, dtype=jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((B, S, heads, H), dtype) for heads in (N, K, K)]


def messages(jaxpr, primitive: str) -> dict[tuple, int]:
    """How often each shape and dtype goes into a collective."""
    found = collections.Counter()
    for equation, times in equations(jaxpr):
        if equation.primitive.name == primitive:
            found[equation.invars[0].aval.shape, equation.invars[0].aval.dtype.type] += times
    return {block: n for block, n in found.items() if n}


def forward_and_both(call, qkv):
    """The forward program, and the one of forward and backward."""
    out = jax.eval_shape(call, *qkv)
    both = jax.make_jaxpr(lambda *qkv: jax.vjp(call, *qkv)[1](jnp.ones(out.shape, out.dtype)))(*qkv)
    return jax.make_jaxpr(call)(*qkv).jaxpr, both.jaxpr


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(("degree", "two_way"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_the_ring_shifts_kv_heads_alone_and_no_shift_is_wasted(shards, degree, two_way, unroll):
    options = {"ulysses_degree": degree, "two_way": two_way, "unroll": unroll}
    call = functools.partial(attention, **plain_tokens(1, 64), mesh=make_mesh(context=shards), **options)
    members, ways = shards // degree, 2 if two_way else 1
    if members == 1 and (two_way or unroll):
        with pytest.raises(ValueError, match="ulysses_degree = 2 = context leaves no ring"):
            call(*arguments(1, 64, 8, 4, 16))
        return
    forward, both = forward_and_both(call, arguments(1, 64, 8, 4, 16))
    kv_block = ((2, 1, 4 // degree // ways, 64 // members, 16), jnp.bfloat16)
    gradient_block = (kv_block[0], jnp.float32)
    if members == 1:
        assert messages(forward, "ppermute") == messages(both, "ppermute") == {}
        return
    assert messages(forward, "ppermute") == {kv_block: ways * (members - 1)}
    assert messages(both, "ppermute") == {kv_block: ways * 2 * (members - 1), gradient_block: ways * members}
    if two_way:
        sides = collections.Counter()
        for equation, times in equations(forward):
            if equation.primitive.name == "ppermute":
                sides[dict(equation.params["perm"])[0]] += times
        assert sides == ({degree: 2} if members == 2 else {degree: members - 1, shards - degree: members - 1})


@pytest.mark.parametrize(("unroll", "permutes"), [(False, 1), (True, 3)])
def test_unrolled_the_steps_stand_one_after_the_other_in_the_program(unroll, permutes):
    call = functools.partial(attention, **plain_tokens(1, 64), mesh=make_mesh(context=4), unroll=unroll)
    lowered = jax.jit(call).lower(*arguments(1, 64, 2, 2, 16, jnp.float32))
    program = lowered.compile(steps.QUICK).as_text()
    assert program.count(" collective-permute(") == permutes


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_all_gather_takes_one_head_at_a_time_and_gathers_none_twice(kv_heads):
    call = functools.partial(attention, **plain_tokens(1, 64), mesh=make_mesh(context=4), strategy="all_gather")
    forward, both = forward_and_both(call, arguments(1, 64, 8, kv_heads, 16))
    head, whole_head = (2, 1, 1, 16, 16), (2, 1, 1, 64, 16)

    def gathered(jaxpr):
        return {block: n for block, n in messages(jaxpr, "all_gather").items() if block[1] != jnp.int32}

    assert gathered(forward) == {(head, jnp.bfloat16): kv_heads}
    assert gathered(both) == {(head, jnp.bfloat16): 2 * kv_heads}
    assert messages(both, "reduce_scatter") == {(whole_head, jnp.float32): kv_heads}


def layers(call, policy=None, remat=True):
    """Gradient of two scanned layers of attention, rematerialised."""

    def layer(x, _):
        out = call(x, x[:, :, :2] * 2, x[:, :, :2] * 3)
        return x + out, None

    body = jax.checkpoint(layer, policy=policy) if remat else layer
    return jax.grad(lambda x: jax.lax.scan(body, x, None, length=2)[0].astype(jnp.float32).sum())


def test_saving_by_name_keeps_remat_from_running_the_ring_again():
    call = functools.partial(attention, **plain_tokens(1, 64), mesh=make_mesh(context=4), layout="dealt")
    x = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))
    saved = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
    programs = {
        "none": layers(call, remat=False),
        "saved": layers(call, saved),
        "one name": layers(call, jax.checkpoint_policies.save_only_these_names(SAVED_NAMES[0])),
        "full": layers(call),
    }
    shifts = {name: count(jax.make_jaxpr(program)(x).jaxpr, "ppermute") for name, program in programs.items()}
    assert shifts["saved"] == shifts["none"] == 2 * (3 + 3 + 4)
    assert shifts["full"] == shifts["one name"] == 2 * (3 + 3 + 3 + 4)
    expected = jax.jit(programs["none"])(x)
    np.testing.assert_allclose(jax.jit(programs["saved"])(x), expected, atol=1e-6 * jnp.abs(expected).max())


@pytest.mark.parametrize("mesh", [None, "context=4"])
def test_no_array_of_the_program_is_as_large_as_the_scores(mesh, monkeypatch):
    monkeypatch.setattr(layout, "TILE", 64)
    S = 8192
    mesh = make_mesh(context=4) if mesh else None
    call = functools.partial(attention, **plain_tokens(1, S), mesh=mesh, layout="dealt")
    jaxpr = jax.make_jaxpr(layers(call))(jax.ShapeDtypeStruct((1, S, 4, 16), jnp.float32))
    sizes = [math.prod(v.aval.shape) for equation, _ in equations(jaxpr.jaxpr) for v in equation.outvars]
    assert max(sizes) <= 2 * 2 * S * 4 * 16  # both layers' inputs, K and V


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_the_program_does_not_grow_with_the_shards(strategy):
    def size(shards: int) -> int:
        call = functools.partial(attention, **plain_tokens(1, 64), mesh=make_mesh(context=shards), strategy=strategy)
        jaxpr = jax.make_jaxpr(lambda *qkv: jax.vjp(call, *qkv)[1](jnp.ones((1, 64, 8, 16))))
        return sum(1 for _ in equations(jaxpr(*arguments(1, 64, 8, 8, 16, jnp.float32)).jaxpr))

    assert size(4) == size(8)


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "shape", "options", "message"),
    [
        ({}, (1, 64, 4, 2), {"strategy": "tree"}, "strategy 'tree' is not one of ring, all_gather, ulysses"),
        ({}, (1, 64, 4, 2), {"kernel": "flash"}, "kernel 'flash' is not one of auto, xla"),
        ({}, (1, 64, 4, 2), {"layout": "snake"}, "layout 'snake' is not one of dealt, zigzag, contiguous"),
        ({}, (1, 64, 4, 3), {}, "4 query heads are not a multiple of 3 key/value heads"),
        ({"context": 4}, (1, 66, 4, 2), {}, "sequence length 66 is not a multiple of context = 4"),
        ({"context": 4}, (1, 68, 4, 2), {"layout": "zigzag"}, "sequence length 68 is not a multiple of 8"),
        ({"data": 2, "fsdp": 2}, (2, 64, 4, 2), {}, "2 rows are not a multiple of data x fsdp = 4"),
        ({"tensor": 8}, (1, 64, 4, 2), {}, "4 query heads are not a multiple of tensor = 8"),
        ({"tensor": 4}, (1, 64, 12, 6), {}, "6 key/value heads can neither be split nor shared evenly over tensor = 4"),
        ({"context": 4}, (1, 64, 4, 2), {"strategy": "ulysses"}, "2 over tensor = 1.*4 shards.*legal .* 1, 2; or use"),
        ({"context": 2, "tensor": 2}, (1, 64, 4, 2), {"strategy": "ulysses"}, "2 over tensor = 2.*are 1; or use"),
        ({"context": 4}, (1, 64, 4, 2), {"ulysses_degree": 4}, "= 4 must divide context = 4 and 2 key.*are 1, 2"),
        ({"context": 4}, (1, 64, 4, 2), {"ulysses_degree": 0}, "ulysses_degree = 0 must divide.*legal are 1, 2"),
        ({}, (1, 64, 4, 2), {"ulysses_degree": 2}, "ulysses_degree = 2 must divide context = 1.*legal are 1"),
        ({"context": 2}, (1, 64, 4, 2), {"strategy": "all_gather", "two_way": True}, "only strategy ring takes them"),
        ({"context": 2}, (1, 64, 4, 2), {"strategy": "ulysses", "ulysses_degree": 2}, "only strategy ring takes"),
        ({"context": 2}, (1, 64, 4, 2), {"strategy": "ulysses", "unroll": True}, "no steps to unroll"),
        ({"context": 2}, (1, 64, 3, 3), {"two_way": True}, "3 key/value heads.*not an even number"),
        ({"context": 4}, (1, 64, 4, 2), {"two_way": True, "ulysses_degree": 2}, "over ulysses_degree = 2 are not"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(mesh, shape, options, message):
    qkv = [jnp.zeros(x.shape) for x in arguments(*shape, 16)]
    with pytest.raises(ValueError, match=message):
        attention(*qkv, **plain_tokens(*shape[:2]), mesh=make_mesh(**mesh) if mesh else None, **options)


def test_shapes_that_differ_are_refused():
    q, k, v = (jnp.zeros(x.shape) for x in arguments(1, 64, 4, 2, 16))
    with pytest.raises(ValueError, match=r"positions and segments must be \(1, 64\).*got \(2, 64\)"):
        attention(q, k, v, **plain_tokens(2, 64))
    with pytest.raises(ValueError, match="differ in rows, sequence length or head_dim"):
        attention(q, k[:, :32], v[:, :32], **plain_tokens(1, 64))
    with pytest.raises(ValueError, match="q, k and v must be"):
        attention(q, k, v[..., :8], **plain_tokens(1, 64))
