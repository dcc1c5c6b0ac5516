"""Real train steps on any mesh, driven with a hand-made batch, that keep the gradients they made."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tiny
from longtrain import model, state
from longtrain.build import Build, build
from longtrain.config import Config, ModelConfig
from longtrain.parallel.mesh import AXES

Batch = dict[str, np.ndarray]
Tree = dict[str, Any]

ROWS, LENGTH = 8, 64

# XLA's host code generation without its slow passes: half the time, and the same program to the last collective.
QUICK: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}


def packed_rows(rows: Sequence[Sequence[int]], length: int, vocabulary: int, seed: int = 0) -> Batch:
    """A batch in document order: each row is a list of document lengths, and the rest of it is padding.

    Tokens and targets are random, a fifth of the weights is 0, the others are 1.
    """
    random = np.random.default_rng(seed)
    shape = (len(rows), length)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(lengths)
        assert ends[-1] <= length
        for number, (end, size) in enumerate(zip(ends, lengths, strict=True), start=1):
            segments[row, end - size : end] = number
            positions[row, end - size : end] = np.arange(size)
    real = segments > 0
    return {
        "tokens": np.where(real, random.integers(0, vocabulary, shape), 0).astype(np.int32),
        "targets": np.where(real, random.integers(0, vocabulary, shape), 0).astype(np.int32),
        "positions": positions,
        "segments": segments,
        "weights": (real & (random.random(shape) < 0.8)).astype(np.float32),
    }


def standard_batch() -> Batch:
    """Eight rows with from 3 to 64 tokens in one to six documents: no two parts of an accumulation weigh the same."""
    rows = [[3], [64], [30, 34], [1, 2, 5, 20, 7], [50, 14], [10] * 6, [33, 20], [17, 40, 7]]
    return packed_rows(rows, LENGTH, vocabulary=512)


def parameters(config: ModelConfig, seed: int = 1) -> Tree:
    """Random parameters in numpy, none at a special value: norms away from 1, all matrices of some weight."""
    random = np.random.default_rng(seed)

    def value(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        noise = random.standard_normal(leaf.shape)
        if "norm" in name:
            return (1 + 0.2 * noise).astype(leaf.dtype)
        return (noise * (1.0 if name == "embed_VD" else 1.2 / config.embed_dim**0.5)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, model.abstract(config)[1])


def place(built: Build, batch: Batch) -> dict[str, jax.Array]:
    """The batch on the devices, in the layout's order."""
    order = built.how.deal.order(built.config.sequence_length)
    specs = built.batch(len(batch["tokens"]))
    dealt = {key: array[:, order] for key, array in batch.items() if key != "row_stats"}
    dealt["row_stats"] = batch.get("row_stats", np.zeros(specs["row_stats"].shape, np.uint32))
    return {key: jax.device_put(array, specs[key].sharding) for key, array in dealt.items()}


def in_document_order(built: Build, array_BS: jax.Array) -> np.ndarray:
    """Undoes `place` for what is computed a token."""
    order = built.how.deal.order(built.config.sequence_length)
    return np.asarray(array_BS)[:, np.argsort(order)]


def no_votes(built: Build) -> jax.Array:
    return jax.device_put(np.zeros(built.mesh.size, np.int32), NamedSharding(built.mesh, P(AXES)))


def place_state(built: Build, values: Tree) -> state.State:
    """The state before the first step, with these parameters."""
    fresh = state.State(np.int32(0), np.int32(0), values, built.optimizer.init(values))
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), fresh, built.state)


def flat(tree: Tree) -> dict[str, np.ndarray]:
    """Dotted name -> value."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def devices(config: Config) -> list[jax.Device]:
    """As many of the simulated devices as the mesh needs."""
    return jax.devices()[: config.mesh.size]


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one step of plain SGD did: its metrics, every gradient it made, and the parameters after it."""

    metrics: dict[str, Any]
    gradients: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


SGD_RATE = 0.1


@functools.cache
def observe(*overrides: str) -> Observed:
    """One train step on the standard batch, for tiny.config with these overrides.

    The optimizer is SGD whose momentum is zero times the past: its state after the step is the gradient itself.
    """
    config = tiny.config(f"batch.sequences={ROWS}", *overrides)
    built = build(config, devices(config)).with_optimizer(optax.trace(decay=0.0), lambda _: SGD_RATE)
    step = built.lowered_train_step().compile(QUICK)
    before = place_state(built, parameters(config.model))
    after, metrics = step(before, place(built, standard_batch()), no_votes(built))
    return Observed(jax.device_get(metrics), flat(after.optimizer.trace), flat(after.parameters))


def assert_same(got: Observed, expected: Observed, tolerance: float = 1e-5) -> None:
    """Loss and gradient norm relative; each gradient and parameter relative to its tensor's largest; counts exactly."""
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(got.metrics[key], expected.metrics[key], rtol=tolerance, err_msg=key)
    for key in ("valid_tokens", "padding_tokens", "squared_lengths"):
        assert got.metrics[key] == expected.metrics[key], key
    for kind in ("gradients", "after"):
        ours, theirs = getattr(got, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            largest = np.abs(value).max()
            assert largest > 0, f"{kind} of {name} are all 0: nothing is compared"
            error = np.abs(ours[name] - value).max() / largest
            assert error <= tolerance, f"{kind} of {name} differ by {error:.1e} of the largest"
