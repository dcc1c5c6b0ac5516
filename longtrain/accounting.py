"""From the sums a step returns to the numbers of its line in `metrics.jsonl`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from longtrain import flops, hardware
from longtrain.build import Build
from longtrain.data.rowsource import RowStats
from longtrain.metrics import finite_or_none
from longtrain.parallel import process

MEASURED_SIZE = 2048


def peak_flops(build: Build) -> tuple[float | None, str]:
    """FLOP/s of all the mesh's devices together in the compute dtype, and where the figure comes from.

    Accelerators: the data sheet's dense peak. CPU, which has none: a matrix product timed here and now, times the
    hosts; simulated devices, and processes, may share one. None where the table has no peak. To be called by all
    processes at once.
    """
    devices = build.mesh.devices.flatten()
    dtype = build.how.compute_dtype
    if devices[0].platform == "cpu":
        hosts = process.host_count()
        rate = _measured_matmul_rate(dtype) * hosts
        return rate, f"this CPU's own {dtype} matmul rate, {rate / 1e9:,.0f} GFLOP/s measured at start, {hosts} host(s)"
    device = hardware.lookup(devices[0].device_kind)
    peak = device.peak(dtype) if device is not None else None
    if device is None or peak is None:
        return None, f"unknown: no {dtype} peak of {devices[0].device_kind!r} in longtrain/hardware.py"
    return peak * devices.size, f"{device.name}: {peak / 1e12:,.0f} TFLOP/s a device in {dtype}, dense, by data sheet"


def _measured_matmul_rate(dtype: str) -> float:
    x = jnp.ones((MEASURED_SIZE, MEASURED_SIZE), dtype, device=jax.local_devices()[0])
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    product(x).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        product(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * MEASURED_SIZE**3 / min(seconds)


@dataclass
class Accounting:
    """Makes the lines of `metrics.jsonl`; keeps the sums that go from line to line.

    Attributes:
      peak: FLOP/s of the whole mesh, or None where unknown (then MFU is null).
      tokens_seen: targets counted so far, restored with the run.
    """

    build: Build
    peak: float | None
    tokens_seen: int
    _since: "_Interval" = field(default_factory=lambda: _Interval())

    def add(self, sums: Mapping[str, Any], *, seconds: float, data_wait: float) -> None:
        """Counts one step.

        Args:
          sums: the step's metrics as numpy arrays, see `step.py`.
          seconds: its wall time, evaluation and saving apart.
          data_wait: seconds of it spent waiting for the batch.
        """
        config = self.build.config
        tokens = config.batch.sequences * config.sequence_length - int(sums["padding_tokens"])
        self.tokens_seen += int(sums["valid_tokens"])
        self._since.steps += 1
        self._since.seconds += seconds
        self._since.data_wait += data_wait
        self._since.valid_tokens += int(sums["valid_tokens"])
        self._since.flops += flops.flops_of_sums(config.model, tokens, float(sums["squared_lengths"]))

    def written(self) -> None:
        """The line was written: times and rates of the next one are means over the steps from here."""
        self._since = _Interval()

    def line(self, step: int, sums: Mapping[str, Any], *, compilations: int) -> dict[str, Any]:
        """The line of the step just added; times and rates are means over all steps since the line before.

        `attention_work_balance`: the busiest member's attention tiles over the mean, both summed over ring steps.
        With strategy `all_gather` there is one step, and with `ulysses` all members have the same.

        Args:
          step: the step's number; the first is 1.
          sums: the step's metrics as numpy arrays.
          compilations: of the train step in this process.
        """
        config = self.build.config
        members = self.build.how.deal.members
        total_tokens = config.batch.sequences * config.sequence_length
        valid_tokens, padding = int(sums["valid_tokens"]), int(sums["padding_tokens"])
        stats = RowStats.of(sums["row_stats"])
        since = self._since
        rate = since.valid_tokens / since.seconds
        return {
            "step": step,
            "loss": finite_or_none(sums["loss"]),
            "grad_norm": finite_or_none(sums["grad_norm"]),
            "learning_rate": finite_or_none(sums["learning_rate"]),
            "valid_tokens": valid_tokens,
            "tokens_seen": self.tokens_seen,
            "documents": stats.documents,
            "padding_fraction": padding / total_tokens,
            "attention_work_balance": stats.busiest_tiles * members / stats.tiles if stats.tiles else 1.0,
            "step_seconds": since.seconds / since.steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / self.build.mesh.size,
            "mfu_causal": None if self.peak is None else since.flops / since.seconds / self.peak,
            "data_wait_seconds": since.data_wait / since.steps,
            "compilations": compilations,
            "batch_hash": f"{stats.hash:016x}",
        }


@dataclass
class _Interval:
    """Sums over the steps since the last line."""

    steps: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0
    valid_tokens: int = 0
    flops: float = 0.0
