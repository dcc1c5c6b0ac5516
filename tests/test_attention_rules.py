"""What a config may ask of attention and what the function takes are one set of rules, told in two places: a config is
refused before jax is imported, a call by its shapes. Here every combination is asked of both."""

import itertools

import jax
import pytest

import tiny
from longtrain.errors import ConfigError
from longtrain.ops import attention

SEQUENCE, HEADS, HEAD_DIM = 64, 8, 8


def the_config_takes_it(kv_heads: int, context: int, tensor: int, **options: object) -> bool:
    try:
        tiny.config(
            f"model.num_heads={HEADS}",
            f"model.head_dim={HEAD_DIM}",
            f"model.num_kv_heads={kv_heads}",
            "mesh.simulate_devices=auto",
            f"mesh.context={context}",
            f"mesh.tensor={tensor}",
            *(f"attention.{key}={value}".lower() for key, value in options.items()),
        )
    except ConfigError:
        return False
    return True


def the_function_takes_it(kv_heads: int, context: int, tensor: int, **options: object) -> bool:
    q, kv = (jax.ShapeDtypeStruct((4, SEQUENCE, heads, HEAD_DIM), "float32") for heads in (HEADS, kv_heads))
    tokens = jax.ShapeDtypeStruct((4, SEQUENCE), "int32")
    axes = {"data": 1, "fsdp": 1, "context": context, "tensor": tensor}
    try:
        attention._check(q, kv, kv, tokens, tokens, axes, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("strategy", attention.STRATEGIES)
def test_config_and_function_refuse_the_same(strategy):
    taken = 0
    for kv_heads, context, tensor, degree, two_way, unroll in itertools.product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4), (False, True), (False, True)
    ):
        asked = (kv_heads, context, tensor)
        options = {"strategy": strategy, "ulysses_degree": degree, "two_way": two_way, "unroll": unroll}
        serves = the_function_takes_it(*asked, **options)
        assert the_config_takes_it(*asked, **options) == serves, (asked, options)
        taken += serves
    assert taken > 10
