"""Spikes of the gradient norm: the running statistics against numpy, and what a spike does to a step."""

import jax
import numpy as np
import pytest

import steps
import tiny
from longtrain.build import build
from longtrain.guard import LEARNING_STEPS, LEAST_DEVIATION, MEMORY_STEPS, NormHistory


def judged(norms: list[float], deviations: float = 4.0) -> tuple[list[bool], NormHistory]:
    judge = jax.jit(NormHistory.judge, static_argnums=2)
    history, spikes = NormHistory.empty(), []
    for norm in norms:
        spike, history = judge(history, np.float32(norm), deviations)
        spikes.append(bool(spike))
    return spikes, history


def usual(count: int) -> list[float]:
    return np.exp(np.random.default_rng(0).normal(-1.0, 0.2, count)).tolist()


def test_the_first_norms_make_a_plain_mean_and_variance():
    norms = usual(MEMORY_STEPS)
    _, history = judged(norms, deviations=100)
    assert int(history.count) == MEMORY_STEPS
    np.testing.assert_allclose(history.mean, np.log(norms).mean(), rtol=1e-5)
    np.testing.assert_allclose(history.variance, np.log(norms).var(), rtol=1e-4)


def test_later_ones_weigh_less_the_older_they_are():
    norms = usual(3 * MEMORY_STEPS)
    _, history = judged(norms, deviations=100)
    logs, share = np.log(norms), 1 / MEMORY_STEPS
    mean, variance = logs[:MEMORY_STEPS].mean(), logs[:MEMORY_STEPS].var()
    for value in logs[MEMORY_STEPS:]:
        # Of a mixture: the old ones with weight 1 - share, the new one with share.
        second = (1 - share) * (variance + mean**2) + share * value**2
        mean = (1 - share) * mean + share * value
        variance = second - mean**2
    np.testing.assert_allclose(history.mean, mean, rtol=1e-4)
    np.testing.assert_allclose(history.variance, variance, rtol=1e-3)


def test_what_is_far_above_is_a_spike_and_what_is_far_below_is_none():
    norms = usual(LEARNING_STEPS)
    logs = np.log(norms)
    limit = logs.mean() + 4 * logs.std()
    for value, expected in ((limit + 0.01, True), (limit - 0.01, False), (logs.mean() - 9, False)):
        spikes, _ = judged([*norms, float(np.exp(value))])
        assert spikes == [False] * LEARNING_STEPS + [expected]


def test_nothing_is_a_spike_before_enough_were_seen():
    assert not any(judged([*usual(LEARNING_STEPS - 1), 1e9])[0])


def test_norms_that_hardly_vary_make_no_spike_of_a_percent():
    spikes, _ = judged([1.0] * LEARNING_STEPS + [1.1, float(np.exp(4.1 * LEAST_DEVIATION))])
    assert spikes[-2:] == [False, True]


def test_norms_that_stay_high_become_usual():
    spikes, _ = judged([*usual(LEARNING_STEPS), *[5.0] * 200])
    assert spikes[LEARNING_STEPS] and not spikes[-1]


@pytest.mark.parametrize("norm", [0.0, float("nan"), float("inf")])
def test_what_is_no_norm_changes_nothing(norm: float):
    spikes, history = judged([*usual(LEARNING_STEPS), norm])
    assert not spikes[-1]
    jax.tree.map(np.testing.assert_array_equal, history, judged(usual(LEARNING_STEPS))[1])


def test_a_spike_is_not_applied():
    config = tiny.config("guard.spike_deviations=3", "batch.sequences=4", "model.num_layers=1")
    built = build(config, steps.devices(config))
    step = built.lowered_train_step().compile(steps.QUICK)
    state = built.initial_state()
    rows = steps.packed_rows([[64]] * 4, 64, vocabulary=512)
    batch = steps.place(built, rows)
    # Weights that nearly cancel in the count: a finite loss, and a gradient of a thousand times the usual norm.
    weights = rows["weights"].copy()
    weights[0, :2] = (1e5, -1e5)
    spiky = steps.place(built, rows | {"weights": weights})
    for _ in range(LEARNING_STEPS):
        state, metrics = step(state, batch, steps.no_votes(built))
        assert not metrics["spike"]
    before = jax.device_get((state.parameters, state.optimizer))
    state, metrics = step(state, spiky, steps.no_votes(built))
    assert metrics["spike"] and metrics["bad_steps"] == 0 and np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.parameters, state.optimizer)))
    assert int(state.step) == LEARNING_STEPS + 1
    state, metrics = step(state, batch, steps.no_votes(built))
    assert not metrics["spike"]
