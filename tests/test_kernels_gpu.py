"""The GPU kernels compiled for GPUs that are not there: a ring's forward and backward pass, and what its program holds.

H200 is H100 to the compiler but for the size of its memory. cuDNN has to be loaded for its kernels to be built.
"""

import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import test_attention
from longtrain.errors import ConfigError
from longtrain.ops.attention import attention
from longtrain.ops.kernels import cudnn_internals
from longtrain.plan import targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ahead_of_time,
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs the extra `plan`"),
]

N, K, SHARDS = 32, 8, 8


def compiled(kind: str, kernel: str, *, length: int, head_dim: int = 128, dtype=jnp.bfloat16) -> jax.stages.Compiled:
    """Forward and backward of a ring of eight, with Llama 3 8B's heads."""
    try:
        target = targets.target(kind, SHARDS)
    except ConfigError as error:
        pytest.skip(str(error))
    shape = (1, 1, SHARDS, 1)
    devices = target.abstract_devices()
    mesh = jax.make_mesh(shape, test_attention.AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    rows = {"layout": "zigzag", "one_document": True} if kernel == "cudnn" else {"layout": "dealt"}

    def both(q, k, v, d_out, positions, segments):
        facts = {"positions_BS": positions, "segments_BS": segments, "mesh": mesh, "kernel": kernel, **rows}
        return jax.vjp(functools.partial(attention, **facts), q, k, v)[1](d_out)

    q, k = (jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype, sharding=sharding) for heads in (N, K))
    numbers = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    return jax.jit(both).lower(q, k, k, q, numbers, numbers).compile()


def calls(program: str, target: str) -> int:
    return len(re.findall(re.escape(f'custom_call_target="{target}"'), program))


@pytest.mark.parametrize(
    ("kind", "kernel", "dtype", "head_dim"),
    [
        ("GB200", "triton", jnp.bfloat16, 128),
        ("H100", "triton", jnp.float32, 64),
        ("GB200", "cudnn", jnp.bfloat16, 128),
    ],
)
def test_a_ring_compiles_for_gpus_in_linear_memory(kind, kernel, dtype, head_dim):
    """At 128K tokens a shard's scores of one head are eight times a shard's q."""
    if kernel == "cudnn" and (missing := cudnn_internals.missing()):
        pytest.skip(missing)
    length = 131072
    program = compiled(kind, kernel, length=length, head_dim=head_dim, dtype=dtype)
    text = program.as_text()
    # In the loop and beside it: two steps' kernels in the forward pass; in the backward pass three.
    if kernel == "triton":
        assert calls(text, "__gpu$xla.gpu.triton") == 2 * 1 + 3 * 2
    else:
        # Two stretches a shard, each with its prefix and its own keys.
        assert calls(text, "__cudnn$fmhaSoftmax") == 2 * 4
        assert calls(text, "__cudnn$fmhaSoftmaxBackward") == 3 * 4
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    scores, q = (length // SHARDS) ** 2, length // SHARDS * N * head_dim
    assert max(sizes) <= q < scores
