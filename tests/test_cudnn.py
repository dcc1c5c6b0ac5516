"""The cuDNN kernel without a GPU: everything of it but the two calls, which dense attention by lengths stands in for.

The stand-ins know only what cuDNN is told (lengths, causal or not), give its dtypes, and NaN where it defines nothing.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import steps
import test_attention
from longtrain.ops.kernels import cudnn, cudnn_internals
from test_attention import Case, packed


def scores(q, k, q_lengths, kv_lengths, scale, causal):
    """[B, N, T, S] in float32, -inf where not seen; and which rows and keys are defined."""
    T, S = q.shape[2], k.shape[2]
    row, key = jnp.arange(T) < q_lengths[:, None], jnp.arange(S) < kv_lengths[:, None]
    seen = row[:, :, None] & key[:, None] & ((jnp.arange(T)[:, None] >= jnp.arange(S)) | (not causal))
    product = jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=jnp.float32, precision="highest")
    return jnp.where(seen[:, None], product * scale, -jnp.inf), row, key


def or_nan(x, defined):
    return jnp.where(defined[:, None, :, None], x, jnp.nan).astype(x.dtype)


def forward(q, k, v, q_lengths, kv_lengths, *, scale, causal):
    assert q_lengths.dtype == kv_lengths.dtype == jnp.int32
    repeat = functools.partial(jnp.repeat, repeats=q.shape[1] // k.shape[1], axis=1)
    s, row, _ = scores(q, repeat(k), q_lengths, kv_lengths, scale, causal)
    lse = jax.nn.logsumexp(s, axis=-1)
    weights = jnp.exp(s - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]).astype(q.dtype)
    out = jnp.einsum("bnts,bnsh->bnth", weights, repeat(v), preferred_element_type=jnp.float32, precision="highest")
    return or_nan(out.astype(q.dtype), row), jnp.where(row[:, None], lse, jnp.nan)


def backward(q, k, v, out, lse, d_out, q_lengths, kv_lengths, *, scale, causal):
    dtype, G = q.dtype, q.shape[1] // k.shape[1]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
    k_all, v_all = (jnp.repeat(x, G, axis=1) for x in (k, v))
    s, row, key = scores(q, k_all, q_lengths, kv_lengths, scale, causal)
    weights = jnp.exp(s - lse[..., None])
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1, keepdims=True)
    d_scores = weights * (dot("bnth,bnsh->bnts", d_out, v_all) - delta) * scale
    dq = dot("bnts,bnsh->bnth", d_scores.astype(dtype), k_all)
    dk, dv = (
        dot("bnts,bnth->bnsh", x.astype(dtype), y).reshape(*k.shape[:2], G, *k.shape[2:]).sum(2)
        for x, y in ((d_scores, q), (weights, d_out))
    )
    return or_nan(dq.astype(dtype), row), or_nan(dk.astype(dtype), key), or_nan(dv.astype(dtype), key)


def one_document_rows(length: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ends = {1, 2, length // 8 - 1, length // 8, length // 8 + 1, length // 2, length // 2 + 1, length - 1}
    rows = {f"{n} tokens": packed(n, n - length) for n in sorted(ends)}
    return {"full": packed(length), "padding alone": packed(-length), **rows}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(cudnn_internals, "forward", forward)
    monkeypatch.setattr(cudnn_internals, "backward", backward)
    monkeypatch.setattr(cudnn, "limits", lambda work: None)


class CudnnCase(Case):
    @functools.cached_property
    def call(self):
        return functools.partial(super().call, kernel="cudnn", one_document=True)

    @functools.cached_property
    def compiled(self):
        whole = super().compiled
        return lambda *arrays: whole.lower(*arrays).compile(steps.QUICK)(*arrays)


def case(*args, **options) -> CudnnCase:
    return CudnnCase(**dataclasses.asdict(test_attention.case(*args, **options)))


CASES = [case("ring 4", layout="zigzag", mesh="context=4")]

MORE_CASES = [
    case("ring 4, bfloat16", layout="zigzag", mesh="context=4", heads=(4, 1), dtype=jnp.bfloat16),
    case("one device, odd length, groups of 3", layout="contiguous", length=77, heads=(3, 1)),
    case("ring 4, contiguous", layout="contiguous", mesh="context=4"),
    case("all_gather 4", "all_gather", "zigzag", mesh="context=4"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_dense_attention(case, monkeypatch):
    monkeypatch.setattr(test_attention, "token_rows", one_document_rows)
    test_attention.assert_exact(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_it_is_dense_attention_in_more_cases(case, monkeypatch):
    monkeypatch.setattr(test_attention, "token_rows", one_document_rows)
    test_attention.assert_exact(case)


@pytest.mark.slow
def test_block_results_in_bfloat16_cost_little():
    """docs/ring_attention.md has the numbers of 2048 tokens, for rings of 1 to 8."""
    size = {"layout": "zigzag", "mesh": "context=8", "length": 1024, "heads": (4, 1), "head_dim": 128}
    float32_results = test_attention.case("xla", **size, dtype=jnp.bfloat16)
    (N, K), H, S = size["heads"], size["head_dim"], size["length"]
    rng = np.random.default_rng(0)
    arrays = (*rng.standard_normal((2, 1, S, N, H)), *rng.standard_normal((2, 1, S, K, H)))
    q, d_out, k, v = (x.astype(jnp.bfloat16) for x in arrays)
    rows = test_attention.Rows(q, k, v, d_out, *(x[None].astype(np.int32) for x in packed(S)))
    answer = rows.reference()

    def errors(case: Case) -> dict[str, float]:
        """Root mean square."""
        got = {name: x.astype(np.float64) - answer.values[name] for name, x in case(rows).items()}
        return {name: np.square(error).mean() ** 0.5 for name, error in got.items()}

    least, got = errors(float32_results), errors(case("cudnn", **size, dtype=jnp.bfloat16))
    ratio = {name: got[name] / least[name] for name in got}
    assert max(ratio.values()) < 1.4, ratio


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_that_break_the_promise_are_right_or_nan(case):
    rows = test_attention.make_rows(case)
    names = list(test_attention.token_rows(case.length))
    answer = rows.reference()
    for name, got in case(rows).items():
        nan = np.isnan(got).any(axis=(2, 3))
        error = np.where(nan[:, :, None, None], 0, np.abs(got - answer.values[name]))
        limit = 2e-6 * np.where(answer.magnitudes[name] == 0, 1, answer.magnitudes[name])
        assert (error <= limit).all(), name
        broken = {row for row, is_nan in zip(names, nan.any(axis=1), strict=True) if is_nan}
        assert not nan[rows.segments == 0].any()
        assert broken >= {"documents", "padding between", "segments that alternate", "positions that fall"}
        assert not broken & {"one document", "padding alone"}


def test_the_internals_of_jax_are_where_they_were():
    """Fails with the release of jax that moves them: then `cudnn_internals` must follow."""
    assert cudnn_internals.moved() is None


def test_internals_that_moved_are_refused_by_name(monkeypatch):
    fake = inspect.signature(lambda query, key, value: None)
    monkeypatch.setattr(cudnn_internals, "_parameters", lambda: (tuple(fake.parameters),) * 2)
    assert "other parameters" in cudnn_internals.moved()
    monkeypatch.undo()
    monkeypatch.setattr(cudnn_internals, "internals", None)
    cudnn_internals._parameters.cache_clear()
    assert "no private cuDNN attention" in cudnn_internals.moved()
