"""Attention broken on purpose, one way at a time: the comparison with dense attention must catch every one.

Each mutant is one piece of source text replaced in one module, which must occur there exactly once, so that this
list cannot fall behind the code unseen.
"""

import contextlib
import dataclasses
import inspect
from types import ModuleType

import jax
import pytest

import test_attention
from longtrain.ops import all_gather, attention, ring, tiles, ulysses
from longtrain.ops.kernels import xla
from longtrain.parallel import group
from test_attention import assert_exact, case, small_tiles  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

RING = case("ring 4", mesh="context=4")
GATHER = case("all_gather 4", "all_gather", mesh="context=4")
ULYSSES = case("ulysses 2", "ulysses", mesh="context=2")
TWO_WAYS = case("ring 4, two ways", mesh="context=4", two_way=True)
GROUPS = case("ring 2 over groups of 2", mesh="context=4", ulysses_degree=2)
SHARED_HEADS = case("fewer kv heads than tensor shards", mesh="context=2 tensor=4")


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    module: ModuleType
    old: str
    new: str
    case: test_attention.Case = RING


MUTANTS = [
    Mutant(
        "a query does not see itself",
        tiles,
        "same & (queries.positions >= keys.positions)",
        "same & (queries.positions > keys.positions)",
    ),
    Mutant(
        "backward alone: a query does not see itself",
        tiles,
        "else seen(columns, rows)",
        "else seen(columns, rows) & (columns.positions > rows.positions)",
    ),
    Mutant(
        "documents see each other",
        tiles,
        "is_seen = seen(rows, columns) if",
        "is_seen = rows.positions >= columns.positions if",
    ),
    Mutant(
        "documents see padding",
        tiles,
        "is_seen = seen(rows, columns) if",
        "is_seen = seen(rows, columns) | (columns.segments == 0) if",
    ),
    Mutant(
        "full tiles by position alone",
        tiles,
        "same & (q.first_position >=",
        "q.one_segment & kv.one_segment & (q.first_position >=",
    ),
    Mutant(
        "full tiles from the last position",
        tiles,
        "(q.first_position >= kv.last_position)",
        "(q.last_position >= kv.last_position)",
    ),
    Mutant(
        "a tile that begins where the query ends is skipped",
        tiles,
        "(q.last_position < kv.first_position)",
        "(q.last_position <= kv.first_position)",
    ),
    Mutant(
        "a tile of the next document is skipped with its own",
        tiles,
        "(q.first_segment > kv.last_segment)",
        "(q.first_segment >= kv.last_segment)",
    ),
    Mutant(
        "one tile too many is skipped",
        tiles,
        "(~is_empty).sum(dtype=jnp.int32)",
        "jnp.maximum((~is_empty).sum(dtype=jnp.int32) - 1, 1)",
    ),
    Mutant("tokens do not travel with their keys", ring, "x[(me - way * step) % shards]", "x[me]"),
    Mutant("tokens travel the wrong way", ring, "(me - way * step) % shards", "(me + way * step) % shards"),
    Mutant(
        "the last shift of the gradient is missing",
        ring,
        "self._shift(d_kv_2BKTH + add_d_kv_2BKTH)",
        "d_kv_2BKTH + add_d_kv_2BKTH",
    ),
    Mutant(
        "the gradient stays while the keys go on",
        ring,
        "self._shift(kv_2BKTH), self._shift(d_kv_2BKTH)",
        "self._shift(kv_2BKTH), d_kv_2BKTH",
    ),
    Mutant(
        "the own block is seen twice, the last never",
        ring,
        "merge(result, attend(shards - 1, kv_2BKTH))",
        "merge(result, attend(0, jnp.stack((k_BKTH, v_BKTH))))",
    ),
    Mutant(
        "gradients travel in bfloat16",
        ring,
        "jnp.stack((dk_BKTH, dv_BKTH))",
        "jnp.stack((dk_BKTH, dv_BKTH)).astype(jnp.bfloat16)",
    ),
    Mutant(
        "partial results in bfloat16",
        ring,
        "return out, jnp.stack((peak, total))",
        "return out.astype(jnp.bfloat16).astype(jnp.float32), jnp.stack((peak, total))",
    ),
    Mutant(
        "merged without the peaks",
        ring,
        "total_x * jnp.exp(peak_x - peak), total_y * jnp.exp(peak_y - peak)",
        "total_x, total_y",
    ),
    Mutant(
        "merged with equal weights",
        ring,
        "(total_x / total)[..., None] + out_y * (total_y / total)",
        "0.5 + out_y * 0.5 * jnp.ones_like(total)",
    ),
    Mutant(
        "the older tiles are not rescaled",
        xla,
        "return sum_KRH * shrink_KR[..., None] + add_KRH",
        "return sum_KRH + add_KRH",
    ),
    Mutant(
        "the total is not rescaled",
        xla,
        "total_KR * shrink_KR + weights_KRS.sum(axis=-1)",
        "total_KR + weights_KRS.sum(axis=-1)",
    ),
    Mutant("no delta", xla, "(d_weights_KSR - delta_KR[:, None])", "d_weights_KSR"),
    Mutant(
        "the softmax is not normalised in the backward",
        xla,
        "stats_2BKGT[0], jnp.log(stats_2BKGT[1])",
        "stats_2BKGT[0], 0 * stats_2BKGT[1]",
    ),
    Mutant("dq without the scale", xla, "return dq_BKGTH * settings.scale, ", "return dq_BKGTH, "),
    Mutant(
        "query heads in the wrong groups",
        attention,
        "(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)",
        "(B, T, N // K, K, H).transpose(0, 3, 2, 1, 4)",
    ),
    Mutant("padding leaks in", attention, "(_blank_padding(x, tokens) for x in", "(x for x in"),
    Mutant("padding leaks out", attention, "return _blank_padding(out_BKGTH.", "return (lambda x, _: x)(out_BKGTH."),
    Mutant(
        "delta from the gradient alone",
        attention,
        "jnp.sum(out.astype(jnp.float32) *",
        "jnp.sum(jnp.ones_like(out, jnp.float32) *",
    ),
    Mutant(
        "tensor shards read the wrong shared head",
        attention,
        'head = lax.axis_index("tensor") // sharers',
        'head = lax.axis_index("tensor") % 2',
        SHARED_HEADS,
    ),
    Mutant(
        "gathered gradients are not summed",
        all_gather,
        "self.group.sum_and_part(d_kv_2B1SH, SEQUENCE)",
        "jnp.split(d_kv_2B1SH, self.group.size, SEQUENCE)[0]",
        GATHER,
    ),
    Mutant(
        "gathered keys without their tokens",
        all_gather,
        "row_tokens = gather_tokens(self.group, tokens)\n        q_KB1GTH",
        "row_tokens = Tokens(*(jnp.tile(x, (1, self.group.size)) for x in tokens))\n        q_KB1GTH",
        GATHER,
    ),
    Mutant(
        "heads come home in the wrong order",
        ulysses,
        "return self._exchange(arrays_BKGS,",
        "return self._exchange([x[:, :, ::-1] for x in arrays_BKGS],",
        ULYSSES,
    ),
    Mutant(
        "a head's queries meet the next head's keys",
        all_gather,
        "attend(kv_2B1SH, q_B1GTH)",
        "attend(self._gather(next_kv_2B1TH), q_B1GTH)",
        GATHER,
    ),
    Mutant(
        "the heads' gradients come home in the wrong order",
        all_gather,
        "d_kv.append(self._reduce(d_kv_2B1SH)[None])",
        "d_kv.insert(0, self._reduce(d_kv_2B1SH)[None])",
        GATHER,
    ),
    Mutant("both halves travel forward", ring, "self.group.shift(x, way)", "self.group.shift(x, 1)", TWO_WAYS),
    Mutant(
        "the tokens of both halves travel forward", ring, "(me - way * step) %", "(me - abs(way) * step) %", TWO_WAYS
    ),
    Mutant(
        "the halves come home swapped",
        ring,
        "x_BK.reshape(ways, rows // ways, heads, *rest).swapaxes(0, 1)",
        "x_BK.reshape(ways, rows // ways, heads, *rest)[::-1].swapaxes(0, 1)",
        TWO_WAYS,
    ),
    Mutant(
        "the rows of the halves take turns",
        ring,
        "jnp.tile(x, (len(self._ways), 1))",
        "jnp.repeat(x, len(self._ways), axis=0)",
        TWO_WAYS,
    ),
    Mutant("a ring of neighbours, not of groups", attention, ", stride=ulysses_degree)", ")", GROUPS),
    Mutant("the shards of a group in the wrong order", group, ".tolist()", "[:, ::-1].tolist()", GROUPS),
    Mutant("a shard takes its place for another", group, "// self.stride % self.size", "% self.size", GROUPS),
    Mutant(
        "a group's tokens are not joined",
        ulysses,
        "group_tokens = gather_tokens(self.group, tokens)\n        q_BKGSH, kv_BK2SH",
        "group_tokens = Tokens(*(jnp.tile(x, (1, self.group.size)) for x in tokens))\n        q_BKGSH, kv_BK2SH",
        GROUPS,
    ),
    Mutant(
        "dK does not go home from its group",
        ulysses,
        "return dq_BKGTH, d_kv_BK2TH[:, :, 0], ",
        "return dq_BKGTH, dk_BKSH.reshape(d_kv_BK2TH[:, :, 0].shape), ",
        GROUPS,
    ),
    Mutant(
        "statistics stay with the group",
        ulysses,
        "jnp.stack(self._to_sequence(*stats_2BKGS))",
        "stats_2BKGS.reshape(2, *out_BKGTH.shape[:-1])",
        GROUPS,
    ),
]


@contextlib.contextmanager
def broken(mutant: Mutant):
    """The module with the mutant's text in it, for as long as the context lasts."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.old) == 1, f"the text to break occurs {source.count(mutant.old)} times"
    original = dict(vars(mutant.module))
    jax.clear_caches()
    exec(compile(source.replace(mutant.old, mutant.new), mutant.name, "exec"), vars(mutant.module))
    try:
        yield
    finally:
        vars(mutant.module).clear()
        vars(mutant.module).update(original)
        jax.clear_caches()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_attention_is_caught(mutant, monkeypatch):
    with broken(mutant):
        monkeypatch.setattr(xla, "SMALLEST_TILE", 8)
        monkeypatch.setattr(test_attention, "attention", attention.attention)
        with pytest.raises(AssertionError):
            assert_exact(dataclasses.replace(mutant.case))


@pytest.mark.parametrize("case", [RING, GATHER, ULYSSES, TWO_WAYS, GROUPS, SHARED_HEADS], ids=lambda case: case.name)
def test_what_the_mutants_are_made_from_is_right(case):
    assert_exact(dataclasses.replace(case))
