"""The GPU's and the TPU's own kernels broken on purpose, interpreted: see test_mutants.py."""

import dataclasses

import jax
import pytest

import test_attention
import test_kernels_tpu
import test_triton
from longtrain import layout
from longtrain.ops import attention
from longtrain.ops.kernels import mosaic, mosaic_grid, triton
from longtrain.ops.kernels.workload import interpreted
from test_mutants import Mutant, broken

pytestmark = pytest.mark.slow

TILE = 8
SIDES = {4: (16, 8)}
# What makes many tiles of a short row, by module: set when the mutant's text has been read.
SMALL = {
    triton: {"FORWARD_SIDES": SIDES, "BACKWARD_SIDES": SIDES, "SMALLEST": TILE},
    mosaic: {},
}
TRITON = [
    ("a tile's sum is not rescaled", "total_R * shrink_R + weights_RC", "total_R + weights_RC"),
    ("a tile's output is not rescaled", "sum_RH * shrink_R[:, None] + add_RH", "sum_RH + add_RH"),
    ("the peak forgets", "jnp.maximum(peak_R, scores_RC.max(axis=1))", "scores_RC.max(axis=1)"),
    ("the last masked tile is left out", "(start, stop - full, visit", "(start, stop - full - 1, visit"),
    ("tiles after the full ones are mistaken", "jnp.where(n < full_start, n, n + full)", "n"),
    (
        "masked tiles are not masked",
        "visit(jnp.where(n < full_start, n, n + full), carry, masked=True)",
        "visit(jnp.where(n < full_start, n, n + full), carry, masked=False)",
    ),
    ("query heads all read the first kv head", "lambda i, n, b: (b, n // G, 0, 0)", "lambda i, n, b: (b, 0, 0, 0)"),
    ("dQ without delta", "(_dot(d_out_RH, v_CH.T) - delta_R1)", "_dot(d_out_RH, v_CH.T)"),
    ("dK without delta", " - delta_ref[g, at][None])", ")"),
    ("dK without the scale", "= dk_RH * scale, dv_RH", "= dk_RH, dv_RH"),
    ("dK of the group's first query head", "q_ref[g, at, :], d_out", "q_ref[0, at, :], d_out"),
    (
        "dV of the group's first query head",
        "q_CH, d_out_CH = q_ref[g, at, :], d_out_ref[g, at, :]",
        "q_CH, d_out_CH = q_ref[g, at, :], d_out_ref[0, at, :]",
    ),
    ("the mask of dK and dV is turned round", "tiles.seen(queries_at(at), keys)", "tiles.seen(keys, queries_at(at))"),
    ("the softmax is not the whole row's", "(scores_RC - peak_R1) - log_total_R1", "scores_RC - peak_R1"),
]

MOSAIC = [
    ("a tile's sum is not rescaled", "stats_ref[p, total] * shrink_1R +", "stats_ref[p, total] +"),
    ("a tile's output is not rescaled", "sum_ref[p] * shrink_1R +", "sum_ref[p] +"),
    (
        "the peak forgets",
        "jnp.maximum(peak_1R, scores_SR.max(axis=0, keepdims=True))",
        "scores_SR.max(axis=0, keepdims=True)",
    ),
    ("masked tiles are not masked", "lambda p: part(p, bias)", "lambda p: part(p, None)"),
    ("no delta", "weights_SR * (d_weights_SR - delta_1R)", "weights_SR * d_weights_SR"),
    ("the softmax is not the whole row's", "(scores_SR - peak_1R) - log_total_1R", "scores_SR - peak_1R"),
    ("dQ without the scale", "(sum_ref[p] * scale).T", "sum_ref[p].T"),
    ("dK without the scale", "q_RH) * scale", "q_RH)"),
    ("dV from the queries", "_rows(grid, d_out_ref[p])\n", "_rows(grid, q_ref[p])\n"),
    ("the sum of a row that sees nothing is 0", "jnp.where(total_1R == 0, 1, total_1R)", "total_1R"),
    ("dK is only the last visit's", "dk_ref[head] += ", "dk_ref[head] = "),
    ("dV is only the last visit's", "dv_ref[head] += ", "dv_ref[head] = "),
]

MUTANTS = [
    *(Mutant(name, triton, old, new, test_triton.case("one device")) for name, old, new in TRITON),
    *(Mutant(name, mosaic, old, new, test_kernels_tpu.case("one device")) for name, old, new in MOSAIC),
]


def told(mutant: Mutant) -> str:
    return f"{mutant.module.__name__.rsplit('.', 1)[-1]}: {mutant.name}"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(layout, "TILE", TILE)
    monkeypatch.setattr(mosaic_grid, "LANES", TILE)
    with interpreted():
        yield
    jax.clear_caches()


@pytest.mark.parametrize("mutant", MUTANTS, ids=told)
def test_a_broken_kernel_is_caught(mutant, monkeypatch):
    with broken(mutant):
        for name, value in SMALL[mutant.module].items():
            monkeypatch.setattr(mutant.module, name, value)
        monkeypatch.setattr(test_attention, "attention", attention.attention)
        with pytest.raises(AssertionError):
            test_attention.assert_exact(dataclasses.replace(mutant.case))


@pytest.mark.parametrize("mutant", [MUTANTS[0], MUTANTS[-1]], ids=told)
def test_what_the_mutants_are_made_from_is_right(mutant, monkeypatch):
    for name, value in SMALL[mutant.module].items():
        monkeypatch.setattr(mutant.module, name, value)
    test_attention.assert_exact(dataclasses.replace(mutant.case))
