"""The shrunk config against plainer runs of itself: the same weights and rows must give the same loss and gradients.

Compared is one train step, by its loss, its gradient norm and every parameter's gradient, each relative to the largest
of the tensor. In float32 only the order of sums may differ. In bfloat16 a run may be off by as much as the plain run
in bfloat16 is off the plain run in float32, which is measured, times NOISE.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

from longtrain.build import Build, build
from longtrain.config import Config, resolve_mesh, with_overrides
from longtrain.doctor import shrink
from longtrain.doctor.checks import Check
from longtrain.errors import LongtrainError
from longtrain.plan import backends
from longtrain.stopping import StopRequest

ROUNDING = {"float32": 5e-5, "bfloat16": 8e-3, "float16": 1e-3}
"""By the parameters' dtype, which is the gradients': what rounding and another order of sums may do."""

NOISE = 3

AXIS_OFF = {
    "context": "attention across the context axis: strategy, layout, permutes",
    "fsdp": "how parameters are cut over fsdp and gathered, or their gradients summed",
    "tensor": "products cut over tensor: heads, MLP or vocabulary",
}
"""Axes of the mesh that are set to 1 in turn, and what is at fault if that makes a difference."""


@dataclass(frozen=True)
class Observed:
    """Of one train step: `loss`, `grad_norm` and each parameter's gradient, by dotted name."""

    values: dict[str, np.ndarray]

    def differences(self, other: "Observed") -> dict[str, float]:
        """By name, the largest difference relative to the other's largest value."""

        def relative(mine: np.ndarray, theirs: np.ndarray) -> float:
            mine, theirs = mine.astype(np.float64), theirs.astype(np.float64)
            difference = float(np.abs(mine - theirs).max())
            return difference / float(np.abs(theirs).max() or 1) if np.isfinite(difference) else float("inf")

        return {name: relative(value, other.values[name]) for name, value in self.values.items()}


def checks(config: Config) -> Iterator[Check]:
    """One check for the compiled step's collectives, one against the plain run, and one for each axis that is in use.

    Raises:
      ConfigError: when the config does not fit the devices, or an explicit choice cannot serve.
    """
    small = shrink.shrunk(config)
    rows = shrink.batch(small)
    built = build(small)
    step = _compiled(built)
    yield _backend(built, step)
    ours = _observe(built, step, rows)

    plain = _plain(small)
    reference = _observed(plain, rows)
    noise = dict.fromkeys(reference.values, 0.0)
    if small.model.compute_dtype != "float32":
        noise = reference.differences(_observed(with_overrides(plain, "model.compute_dtype=float32"), rows))
    limits = {name: ROUNDING[small.model.param_dtype] + NOISE * value for name, value in noise.items()}

    sizes = built.mesh.shape
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    means = "the shrunk config computes something else than the plain run; the checks below say where"
    yield _check(f"{mesh} against data {built.mesh.size} and the plain kernel", ours, reference, limits, means)
    for axis, fault in AXIS_OFF.items():
        if (size := sizes[axis]) > 1:
            theirs = _observed(_without(small, axis), rows)
            yield _check(f"{axis} {size} against {axis} 1", ours, theirs, limits, f"the fault is in {fault}")
    if (parts := small.batch.accumulation) > 1:
        theirs = _observed(with_overrides(small, "batch.accumulation=1"), rows)
        means = "micro-batches do not add up to their batch"
        yield _check(f"accumulation {parts} against 1", ours, theirs, limits, means)


def _plain(config: Config) -> Config:
    """All devices share the rows and nothing else; the blockwise kernel, rows in order."""
    return with_overrides(
        config,
        f"mesh.data={len(jax.devices())}",
        *(f"mesh.{axis}=1" for axis in AXIS_OFF),
        "batch.accumulation=1",
        "attention={strategy: ring, layout: contiguous, kernel: xla}",
        "attention.ulysses_degree=1",
        "attention.two_way=false",
        "attention.unroll=false",
        "memory.offload=none",
    )


def _without(config: Config, axis: str) -> Config:
    """The axis 1, and its devices given to `data`."""
    mesh = resolve_mesh(config, len(jax.devices()))
    overrides = [f"mesh.{axis}=1", f"mesh.data={mesh.data * mesh.axes[axis]}"]
    if axis == "context":  # what asks for a ring or its like
        overrides += ["attention.ulysses_degree=1", "attention.two_way=false", "attention.unroll=false"]
    return with_overrides(config, *overrides)


def _observed(config: Config, rows: shrink.Batch) -> Observed:
    built = build(config)
    return _observe(built, _compiled(built), rows)


def _compiled(built: Build) -> jax.stages.Compiled:
    # Accelerators multiply float32 more coarsely unless told, and then meshes differ by more than a fault might.
    exact = built.config.model.compute_dtype == "float32"
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        return _keeping_gradients(built).train_step()


def _keeping_gradients(built: Build) -> Build:
    """The build with an optimizer whose state after a step is the gradient: momentum that forgets all but the last."""
    return built.with_optimizer(optax.trace(decay=0.0), optax.constant_schedule(1.0))


def _observe(built: Build, step: jax.stages.Compiled, rows: shrink.Batch) -> Observed:
    keeping = _keeping_gradients(built)
    after, metrics = step(keeping.initial_state(), keeping.place(rows), StopRequest().votes(keeping.mesh))
    values = {key: np.asarray(metrics[key]) for key in ("loss", "grad_norm")}
    leaves, _ = jax.tree_util.tree_flatten_with_path(process_allgather(after.optimizer.trace, tiled=True))
    return Observed(values | {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves})


def _check(name: str, ours: Observed, theirs: Observed, limits: dict[str, float], means: str) -> Check:
    differences = ours.differences(theirs)
    empty = [key for key, value in theirs.values.items() if not value.any() or not np.isfinite(value).all()]
    excess = {key: difference / limits[key] for key, difference in differences.items()}
    worst = max(excess, key=lambda key: excess[key])
    gradients = {key: value for key, value in differences.items() if key not in ("loss", "grad_norm")}
    largest = max(gradients, key=lambda key: gradients[key])
    detail = (
        f"loss differs by {differences['loss']:.1e}, grad norm by {differences['grad_norm']:.1e}, "
        f"gradients by up to {gradients[largest]:.1e} of the largest ({largest})"
    )
    if empty:
        return Check(name, False, f"{detail}; nothing to compare: {', '.join(empty)} zero or not finite")
    if excess[worst] > 1:
        over = f"{worst} by {differences[worst]:.1e}, where {limits[worst]:.1e} is rounding"
        return Check(name, False, f"{detail}; beyond rounding: {over}. This means: {means}")
    return Check(name, True, detail)


def _backend(built: Build, step: jax.stages.Compiled) -> Check:
    name = "collective backend"
    said: list[str] = []
    try:
        backends.check(built, step, said.append)
    except LongtrainError as error:
        return Check(name, False, " ".join(str(error).split()))
    kind = built.mesh.devices.flat[0].device_kind
    return Check(name, True, "; ".join(said) or f"{kind} has one backend, and communication.backend asks for no other")
