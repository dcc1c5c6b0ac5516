"""Law 7: one compilation of the train step, whatever comes after; another shape or sharding is an error."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import steps
import tiny
from longtrain.build import build
from longtrain.compilations import Compilations


def test_compilations_counts_what_xla_compiles_and_nothing_else():
    count = Compilations("measured_function")

    def measured_function(x):
        return x + 1

    jitted = jax.jit(measured_function)
    jitted(np.zeros(3)), jitted(np.ones(3))
    assert count.count == 1
    jitted(np.zeros(4))
    assert count.count == 2
    jax.jit(lambda x: x + 2)(np.zeros(5))
    assert count.count == 2


@pytest.fixture(scope="module")
def built():
    config = tiny.config("mesh.context=2")
    return build(config, steps.devices(config))


def test_a_fresh_and_a_resumed_run_compile_the_train_step_once(built):
    count = Compilations("train_step")
    step = built.train_step()
    batch = steps.place(built, steps.packed_rows([[64]] * 4, steps.LENGTH, vocabulary=512))

    state = steps.place_state(built, steps.parameters(built.config.model))
    for number in range(1, 4):
        state, metrics = step(state, batch, steps.no_votes(built))
        assert int(state.step) == number
    # As a restore gives it: other arrays of the abstract state's shapes and shardings.
    restored = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), state, built.state)
    restored, _ = step(restored, batch, steps.no_votes(built))
    assert int(restored.step) == 4
    assert np.isfinite(metrics["loss"])
    assert count.count == 1

    half = {key: array[:2] for key, array in batch.items()}
    with pytest.raises(TypeError, match="shape|int32"):
        step(restored, half, steps.no_votes(built))
    rows_only = NamedSharding(built.mesh, P(("data", "fsdp")))
    moved = {key: jax.device_put(array, rows_only) for key, array in batch.items()}
    with pytest.raises(ValueError, match="[Ss]harding"):
        step(restored, moved, steps.no_votes(built))
    assert count.count == 1
