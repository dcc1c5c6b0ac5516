"""Schedules at chosen steps, and updates against the papers' formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from longtrain import optimizer
from longtrain.config import OptimizerConfig

PEAK, STEPS, WARMUP = 2e-3, 100, 10


def config(**keys) -> OptimizerConfig:
    return OptimizerConfig(**({"learning_rate": PEAK} | keys))


def rates(steps: int = STEPS, **keys) -> np.ndarray:
    """The learning rate of each update, the first has index 0."""
    return np.array([float(rate) for rate in jax.vmap(optimizer.schedule(config(**keys), steps))(jnp.arange(steps))])


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(decay):
    rate = rates(decay=decay, warmup_steps=WARMUP)
    np.testing.assert_allclose(rate[:WARMUP], PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-5)
    assert rate.max() == pytest.approx(PEAK, rel=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_lowest_rate(decay, warmup, ratio):
    rate = rates(decay=decay, warmup_steps=warmup, min_ratio=ratio)
    assert rate[-1] == pytest.approx(ratio * PEAK, rel=1e-5, abs=1e-9)
    assert (np.diff(rate[warmup:]) <= 1e-9).all()
    if ratio < 1:
        assert rate[-2] > rate[-1]


def test_shapes_between():
    last = STEPS - 1
    progress = np.arange(last - WARMUP + 1) / (last - WARMUP)
    cosine, linear = (rates(decay=decay, warmup_steps=WARMUP)[WARMUP:] for decay in ("cosine", "linear"))
    np.testing.assert_allclose(cosine, PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2), rtol=1e-4)
    np.testing.assert_allclose(linear, PEAK * (1 - 0.9 * progress), rtol=1e-4)
    np.testing.assert_allclose(rates(decay="constant", warmup_steps=WARMUP)[WARMUP:], PEAK, rtol=1e-6)


def test_wsd_is_flat_until_its_last_part_and_then_a_line():
    rate = rates(decay="wsd", warmup_steps=WARMUP, decay_fraction=0.25)
    fall = 25
    np.testing.assert_allclose(rate[WARMUP : STEPS - fall], PEAK, rtol=1e-6)
    np.testing.assert_allclose(rate[-fall - 1 :], PEAK * np.linspace(1, 0.1, fall + 1), rtol=1e-4)
    whole = rates(decay="wsd", warmup_steps=WARMUP, decay_fraction=1.0)
    assert whole[WARMUP] == pytest.approx(PEAK, rel=1e-6)
    assert whole[-1] == pytest.approx(0.1 * PEAK, rel=1e-5)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (3, 3), (2, 1)])
def test_short_runs_have_a_rate(decay, steps, warmup):
    rate = rates(steps, decay=decay, warmup_steps=warmup)
    assert np.isfinite(rate).all()
    assert (rate > 0).all()


def parameters() -> dict:
    random = np.random.default_rng(0)
    return {
        "embed_VD": random.standard_normal((5, 4)),
        "layers": {"q_DNH": random.standard_normal((2, 4, 2, 2)), "mlp_norm_D": 1 + random.standard_normal((2, 4))},
        "final_norm_D": 1 + random.standard_normal(4),
    }


def gradients(number: int, scale: float) -> dict:
    random = np.random.default_rng(number + 1)
    return jax.tree.map(lambda value: scale * random.standard_normal(value.shape), parameters())


def by_hand(settings: OptimizerConfig, scales: list[float]) -> dict:
    """The parameters after as many updates at rate PEAK, in float64."""
    decays = {"embed_VD": True, "layers": {"q_DNH": True, "mlp_norm_D": False}, "final_norm_D": False}
    values = parameters()
    first = jax.tree.map(np.zeros_like, values)
    second = jax.tree.map(np.zeros_like, values)
    b1, b2 = settings.beta1, settings.beta2
    for number, scale in enumerate(scales):
        gradient = gradients(number, scale)
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
        if settings.clip_norm is not None and norm > settings.clip_norm:
            gradient = jax.tree.map(lambda g, norm=norm: g * settings.clip_norm / norm, gradient)
        if settings.name == "adamw":
            first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradient)
            second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, second, gradient)
            n = number + 1
            direction = jax.tree.map(
                lambda m, v, n=n: m / (1 - b1**n) / (np.sqrt(v / (1 - b2**n)) + settings.eps), first, second
            )
        elif settings.name == "lion":
            direction = jax.tree.map(lambda m, g: np.sign(b1 * m + (1 - b1) * g), first, gradient)
            first = jax.tree.map(lambda m, g: b2 * m + (1 - b2) * g, first, gradient)
        else:
            direction = gradient
        values = jax.tree.map(
            lambda value, step, decay: value - PEAK * (step + decay * settings.weight_decay * value),
            values, direction, decays,
        )  # fmt: skip
    return values


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("clip_norm", [None, 3.0])
def test_updates_are_the_papers(name, clip_norm):
    settings = config(name=name, clip_norm=clip_norm, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-3)
    scales = [1.0, 0.1, 5.0, 0.3]  # beyond the clip, below it, and so on
    single = jax.tree.map(jnp.float32, parameters())
    update = optimizer.make(settings)
    moments = update.init(single)
    for number, scale in enumerate(scales):
        directions, moments = update.update(jax.tree.map(jnp.float32, gradients(number, scale)), moments, single)
        single = optax.apply_updates(single, jax.tree.map(lambda direction: -PEAK * direction, directions))
    moved = 0.0
    for got, expected, start in zip(
        *(jax.tree.leaves(tree) for tree in (single, by_hand(settings, scales), parameters())), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        moved = max(moved, np.abs(expected - start).max())
    assert moved > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipping_is_by_the_norm_of_all_gradients_in_float32(dtype):
    random = np.random.default_rng(0)
    gradient = {f"tensor_{number}_DF": jnp.asarray(random.standard_normal((64, 64)), dtype) for number in range(3)}
    norm = np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in gradient.values()))
    assert float(optimizer.global_norm(gradient)) == pytest.approx(norm, rel=1e-6)
    for limit in (norm / 3, norm * 1.01):
        update = optimizer.make(config(name="sgd", clip_norm=limit, weight_decay=0.0))
        clipped, _ = update.update(gradient, update.init(gradient), gradient)
        assert {leaf.dtype for leaf in clipped.values()} == {jnp.dtype(dtype)}
        # A norm rounded to bfloat16 would be off by up to 4e-3.
        assert float(optimizer.global_norm(clipped)) == pytest.approx(min(norm, limit), rel=2e-4)


def test_no_gradient_is_no_nan():
    update = optimizer.make(config(weight_decay=0.0))
    zeros = {"q_DNH": jnp.zeros((2, 2, 2))}
    direction, _ = update.update(zeros, update.init(zeros), zeros)
    assert not np.asarray(direction["q_DNH"]).any()
