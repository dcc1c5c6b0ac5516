"""The largest buffers of a compiled step, against the compiler's own account of its memory."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from longtrain.plan import buffers
from longtrain.plan.program import Program

LAYERS, WIDTH = 12, 512
SQUARE = 4 * WIDTH * WIDTH


def layers(x, w_LDD):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))  # saves x alone
    return lax.scan(lambda x, w: (layer(x, w), None), x, w_LDD)[0]


def gradient(x, w_LDD):
    return jax.grad(lambda w_LDD: jnp.sum(layers(x, w_LDD)))(w_LDD)


def compiled(function, **options) -> tuple[Program, int]:
    """The program, and the bytes that the compiler says it needs."""
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    w_LDD = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    done = jax.jit(function, **options).lower(x, w_LDD).compile()
    stats = done.memory_analysis()
    needed = (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )
    return Program.read(done.as_text(), {"data": 1}, "cpu"), needed


@pytest.mark.parametrize("function", [layers, gradient])
def test_the_peak_is_near_the_compilers_own(function):
    program, needed = compiled(function)
    assert buffers.peak(program).bytes == pytest.approx(needed, rel=0.1)


def test_what_the_backward_pass_saves_is_found_with_its_line():
    program, _ = compiled(gradient)
    found = buffers.largest(program, 8)
    stacks = [one for one in found if one.array.dims == (LAYERS, WIDTH, WIDTH)]
    # The weights, each layer's input, and the weights' gradient: nothing twice, though loops carry them.
    assert sum(one.count for one in stacks) == 3 and all(one.array.bytes == LAYERS * SQUARE for one in stacks)
    assert {one.scope for one in stacks if not one.source} == {"w_LDD"}
    assert all(one.source.startswith("test_buffers.py:") for one in stacks if one.scope != "w_LDD")
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


def test_without_a_gradient_nothing_is_saved():
    program, _ = compiled(layers)
    assert sum(one.count for one in buffers.largest(program, 8) if one.array.dims[:1] == (LAYERS,)) == 1
