"""The chunked cross-entropy against the plain one in float64, on meshes; and that whole logits never exist."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import steps
from longtrain.ops.loss import token_losses
from longtrain.parallel.mesh import make_mesh
from longtrain.parallel.sharding import ACTIVATION, PARAMETER, spec

B, S, D, V = 4, 24, 16, 40


def mesh(data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    shape = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    return make_mesh(shape, jax.devices()[: data * fsdp * context * tensor])


def reference(x, head, targets, weights):
    """Losses, and the gradients of their weighted sum in x and the head, all in float64."""
    logits = x @ head
    logits -= logits.max(-1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(V)[targets]
    d_logits = (probabilities - one_hot) * weights[..., None]
    losses = -np.log((probabilities * one_hot).sum(-1))
    return losses, d_logits @ head.T, np.einsum("bsd,bsv->dv", x, d_logits)


def inputs(dtype=np.float32):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((B, S, D)), dtype)
    head = random.standard_normal((D, V)).astype(np.float32)
    targets = random.integers(0, V, (B, S)).astype(np.int32)
    targets[0, :4] = 0, V - 1, V // 2 - 1, V // 2  # both edges of a vocabulary shard
    weights = random.standard_normal((B, S)).astype(np.float32)
    return x, head, targets, weights


def compiled(on, arguments, chunk):
    def loss(x, head, targets, weights):
        losses = token_losses(x, head, targets, on, chunk)
        return (losses * weights).sum(), losses

    cuts = [NamedSharding(on, spec(*table)) for table in
            (("BSD", ACTIVATION), ("DV", PARAMETER), ("BS", ACTIVATION), ("BS", ACTIVATION))]  # fmt: skip
    placed = [jax.device_put(argument, cut) for argument, cut in zip(arguments, cuts, strict=True)]
    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), out_shardings=((cuts[0], cuts[1]), cuts[2]))
    return step.lower(*placed).compile(steps.QUICK), placed


@pytest.mark.parametrize(
    ("axes", "chunk"),
    [({}, 1000), ({"tensor": 2}, 5), ({"context": 2, "fsdp": 2, "tensor": 2}, 5), ({"data": 2, "context": 4}, 1)],
    ids=str,
)
def test_losses_and_gradients_are_those_of_plain_cross_entropy(axes, chunk):
    step, placed = compiled(mesh(**axes), inputs(), chunk)
    (dx, dhead), losses = step(*placed)
    x, head, targets, weights = (np.asarray(value) for value in inputs())
    for got, expected in zip((losses, dx, dhead), reference(np.float64(x), head, targets, weights), strict=True):
        assert got.dtype == jnp.float32
        assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()


def test_bfloat16_products_are_summed_in_float32():
    step, placed = compiled(mesh(context=2, tensor=2), inputs(jnp.bfloat16), 5)
    (dx, dhead), losses = step(*placed)
    assert (losses.dtype, dx.dtype, dhead.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    x, head, targets, weights = inputs(jnp.bfloat16)
    rounded_head = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float64)
    expected = reference(np.asarray(x, np.float64), rounded_head, targets, weights)
    # The inputs are rounded alike, so the losses show float32 sums; the logits' gradient is rounded for the products.
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5, atol=1e-5)
    for got, value in zip((dx, dhead), expected[1:], strict=True):
        assert np.abs(np.asarray(got, np.float64) - value).max() < 2**-8 * np.abs(value).max()


@pytest.mark.parametrize(("chunk", "whole"), [(3, False), (S, True)])
def test_logits_of_the_whole_sequence_never_exist(chunk, whole):
    """No array of a device's program is as large as its logits would be; with one chunk for all, one is."""
    on = mesh(context=2, tensor=2)
    step, _ = compiled(on, inputs(), chunk)
    shapes = re.findall(r"\w+\[([\d,]+)\]", step.as_text())
    largest = max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes)
    local_logits = B * (S // 2) * (V // 2)
    assert (largest >= local_logits) == whole


def test_great_logits_do_not_overflow():
    x, head, targets, weights = inputs()
    step, placed = compiled(mesh(tensor=2), (x * 1e4, head, targets, weights), 5)
    gradients, losses = step(*placed)
    assert all(np.isfinite(value).all() for value in (*gradients, losses))
    assert (np.asarray(losses) >= 0).all()
