"""The train step: accumulation, padding, steps that are not finite, donation, and what it counts."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import steps
import tiny
from longtrain import optimizer
from longtrain.build import build
from longtrain.errors import ConfigError

SMALL = ("model.num_layers=1", "model.embed_dim=32", "model.vocab_size=264", "model.mlp_dim=48", "memory.remat=none")


@functools.cache
def built():
    config = tiny.config(*SMALL, "optimizer.name=adamw", "optimizer.clip_norm=0.01", "optimizer.warmup_steps=2")
    return build(config, steps.devices(config))


@pytest.fixture(scope="module")
def step():
    compiled = built().lowered_train_step().compile(steps.QUICK)
    return lambda state, batch: compiled(state, steps.place(built(), batch), steps.no_votes(built()))


@pytest.fixture
def state():
    return steps.place_state(built(), steps.parameters(built().config.model))


def batch(seed: int = 0) -> steps.Batch:
    return steps.packed_rows([[64], [5, 20], [30, 30], [1]], steps.LENGTH, vocabulary=264, seed=seed)


def padding() -> steps.Batch:
    return {key: np.zeros_like(array) for key, array in batch().items()}


def weights_and_moments(state) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.parameters, state.optimizer))]


def assert_unmoved(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("accumulation", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulation_is_exact_for_parts_of_unequal_weight(accumulation):
    weights = steps.standard_batch()["weights"].sum(1)
    parts = [weights[part::accumulation].sum() for part in range(accumulation)]
    assert len(set(parts)) == accumulation
    steps.assert_same(steps.observe(f"batch.accumulation={accumulation}"), steps.observe())


def test_gradients_of_bfloat16_parameters_are_accumulated_in_float32():
    """Eight times the same part is exactly eight times one part: in bfloat16 the third sum would already be rounded."""
    config = tiny.config(*SMALL, "model.param_dtype=bfloat16", "batch.sequences=8", "batch.accumulation=8")
    eight = build(config, steps.devices(config)).with_optimizer(optax.trace(decay=0.0), lambda _: 0.0)
    compiled = eight.lowered_train_step().compile(steps.QUICK)

    def gradients(given: steps.Batch) -> dict[str, np.ndarray]:
        before = steps.place_state(eight, steps.parameters(config.model))
        after, _ = compiled(before, steps.place(eight, given), steps.no_votes(eight))
        return steps.flat(after.optimizer.trace)

    same = {key: np.repeat(array[:1], 8, axis=0) for key, array in batch().items()}
    one = same | {"weights": np.where(np.arange(8)[:, None] == 0, same["weights"], 0)}
    # One part's share of its own count is eight times its share of all eight's; powers of two round nothing.
    expected = gradients(one)
    for name, gradient in gradients(same).items():
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)
        assert np.count_nonzero(gradient) > 0


def test_the_norm_and_the_rate_are_those_before_clipping(step, state):
    after, metrics = step(state, batch())
    settings = built().config.optimizer
    # Adam's first moment after one step is (1 - beta1) times the clipped gradient.
    clipped = jax.tree.leaves(after.optimizer[1].mu)
    norm = float(optimizer.global_norm(clipped)) / (1 - settings.beta1)
    assert norm == pytest.approx(settings.clip_norm, rel=1e-5)
    assert metrics["grad_norm"] > 10 * settings.clip_norm
    assert float(metrics["learning_rate"]) == pytest.approx(settings.learning_rate / 2)


def test_metrics_count_what_the_batch_held(step, state):
    given = batch()
    given["row_stats"] = np.arange(28, dtype=np.uint32).reshape(4, 1, 7)
    _, metrics = step(state, given)
    assert metrics["valid_tokens"] == (given["weights"] > 0).sum()
    assert metrics["padding_tokens"] == 39 + 4 + 63
    assert metrics["squared_lengths"] == 64**2 + 5**2 + 20**2 + 30**2 + 30**2 + 1
    np.testing.assert_array_equal(metrics["row_stats"], given["row_stats"].sum((0, 1)))
    assert metrics["stop_votes"] == 0


def test_a_batch_of_padding_moves_nothing_but_the_step_number(step, state):
    state, _ = step(state, batch())  # moments and weight decay have something to move
    before = weights_and_moments(state)
    state, metrics = step(state, padding())
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert metrics["valid_tokens"] == 0
    assert (int(state.step), int(state.bad_steps)) == (2, 0)
    assert_unmoved(before, weights_and_moments(state))


def not_a_number() -> steps.Batch:
    bad = batch()
    bad["weights"][0, 3] = np.nan
    return bad


def overflowing_gradient() -> steps.Batch:
    """Two weights that cancel in the count: the loss is finite, the squares of the gradients are not."""
    bad = batch()
    bad["weights"][:] = 0
    bad["weights"][0, 0], bad["weights"][0, 3:5] = 1, (1e22, -1e22)
    return bad


@pytest.mark.parametrize("bad", [not_a_number, overflowing_gradient])
def test_steps_that_are_not_finite_are_not_applied_and_counted_until_a_good_one(step, state, bad):
    state, _ = step(state, batch())
    before = weights_and_moments(state)
    for count in (1, 2):
        state, metrics = step(state, bad())
        assert np.isfinite(metrics["loss"]) == (bad is overflowing_gradient)
        assert not np.isfinite(metrics["grad_norm"])
        assert int(metrics["bad_steps"]) == int(state.bad_steps) == count
    assert_unmoved(before, weights_and_moments(state))
    state, metrics = step(state, batch())
    assert np.isfinite(metrics["loss"])
    assert (int(state.step), int(state.bad_steps), int(metrics["bad_steps"])) == (4, 0, 0)
    assert any((old != new).any() for old, new in zip(before, weights_and_moments(state), strict=True))


def test_the_state_is_donated(step, state):
    step(state, batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.parameters["embed_VD"])


def test_the_loss_of_a_batch_seen_again_and_again_falls(step, state):
    losses = []
    for _ in range(built().config.run.steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_the_eval_step_sums_what_the_train_step_divides(step, state):
    compiled = built().eval_step(4)
    sums = compiled(state.parameters, steps.place(built(), batch()))
    _, metrics = step(state, batch())
    assert sums["weight_sum"] == batch()["weights"].sum()
    assert float(sums["loss_sum"] / sums["weight_sum"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert sums["squared_lengths"] == metrics["squared_lengths"]


def test_the_loss_of_the_same_rows_in_another_order_is_the_same(step, state):
    other = {key: array[::-1] for key, array in batch().items()}
    again = steps.place_state(built(), steps.parameters(built().config.model))
    (_, one), (_, two) = step(state, batch()), step(again, other)
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-6)
    assert float(one["grad_norm"]) == pytest.approx(float(two["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize("offload", ["none", "attention"])
def test_offloading_sends_attentions_results_to_the_host_and_nothing_else(offload):
    """The CPU has no second memory, and its compiler drops the transfers: the program as traced must do."""
    config = tiny.config("mesh.context=2", "model.num_layers=3")
    built = build(config, steps.devices(config))
    how = dataclasses.replace(built.how, offload=offload)

    def loss(parameters, batch):
        return nnx.merge(built.graph, parameters).losses(batch, how).sum()

    moved = collections.Counter()

    def count(jaxpr, times: int) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "device_put":
                [place] = equation.params["devices"]
                moved[place, equation.invars[0].aval.shape] += times
            inner = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
            for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                    count(getattr(part, "jaxpr", part), inner)

    count(jax.make_jaxpr(jax.grad(loss))(built.state.parameters, built.batch(4)).jaxpr, 1)
    # Of a device and layer: out [B, K, G, T, H] and the statistics [2, B, K, G, T], there and back.
    out, statistics = (4, 2, 2, 32, 16), (2, 4, 2, 2, 32)
    there, back = jax.memory.Space.Host, jax.memory.Space.Device
    expected = {(place, shape): 3 for place in (there, back) for shape in (out, statistics)}
    assert moved == (expected if offload == "attention" else {})


def test_offloading_is_refused_on_the_cpu():
    config = tiny.config("memory.offload=attention")
    with pytest.raises(ConfigError, match="memory.offload = 'attention': must be none on the CPU"):
        build(config, steps.devices(config))
