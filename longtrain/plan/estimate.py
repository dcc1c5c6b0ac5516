"""The plan of a config: what it takes, whether it fits, how its step's time splits. From formulas alone."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtrain import flops, hardware
from longtrain.config import Config, resolve_mesh
from longtrain.errors import ConfigError, Problem
from longtrain.hardware import Device
from longtrain.parallel import backend
from longtrain.plan import assumptions, kernels, memory, timing
from longtrain.plan.assumptions import Assumptions
from longtrain.plan.memory import Memory
from longtrain.plan.share import Share
from longtrain.plan.timing import Timing


@dataclass(frozen=True)
class Plan:
    """A config on a number of devices of one kind.

    Attributes:
      document_tokens: length of the documents that fill the rows; the row's own unless told otherwise.
    """

    share: Share
    assumed: Assumptions
    document_tokens: int
    memory: Memory
    timing: Timing

    @property
    def config(self) -> Config:
        return self.share.config

    @property
    def device(self) -> Device:
        return self.assumed.device

    @property
    def usable_bytes(self) -> int:
        """The device's memory without the reserve."""
        return int(self.device.memory_bytes * (1 - self.assumed["memory_reserve"]))

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable_bytes

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return flops.parameters(self.config.model)

    @property
    def flops_per_step(self) -> float:
        """FLOPs of the whole cluster's step."""
        return timing.step_flops(self.share, self.document_tokens)

    @property
    def tokens_per_second_per_device(self) -> float:
        tokens = self.config.batch.sequences * self.config.sequence_length
        return tokens / self.timing.step / self.share.devices

    @property
    def mfu_causal(self) -> float | None:
        """None where the hardware has no published peak in the compute dtype."""
        peak = self.device.peak(self.config.model.compute_dtype)
        return self.flops_per_step / self.timing.step / self.share.devices / peak if peak else None

    def to_json(self) -> dict[str, Any]:
        """What `plan --json` writes; `compiled` is for who compiles."""
        return {
            "hardware": self.device.name,
            "devices": self.share.devices,
            "fits": self.fits,
            "parameters": self.parameters,
            "flops_per_step": self.flops_per_step,
            "device_memory_bytes": self.device.memory_bytes,
            "usable_memory_bytes": self.usable_bytes,
            "memory_bytes": self.memory.by_kind | {"total": self.memory.total},
            "memory_terms": [{"kind": term.kind, "what": term.what, "bytes": term.bytes} for term in self.memory.terms],
            "step_seconds": self.timing.step,
            "step_seconds_split": {
                "matmul": self.timing.matmul,
                "attention": self.timing.attention,
                "memory": self.timing.memory,
                "exposed_communication": self.timing.exposed,
            },
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu_causal": self.mfu_causal,
            "transfers": [
                {
                    "what": transfer.what,
                    "kind": transfer.kind,
                    "axes": list(transfer.axes),
                    "count": transfer.count,
                    "bytes": transfer.bytes,
                    "seconds": transfer.seconds,
                    "exposed_seconds": transfer.exposed,
                }
                for transfer in self.timing.transfers
            ],
            "assumptions": {name: entry.value for name, entry in self.assumed.entries.items()},
            "compiled": None,
        }


def plan(
    config: Config,
    kind: str | None,
    *,
    devices: int | None = None,
    document_tokens: int | None = None,
    assumptions_file: Path | None = None,
) -> Plan:
    """The plan of a config on devices of a kind.

    Args:
      kind: a name of `hardware.DEVICES` or a jax device kind; None is refused with the legal ones.
      devices: how many; the mesh's product unless given.
      document_tokens: length of the documents that fill the rows; a row's unless given.
      assumptions_file: entries in place of the shipped table's.

    Raises:
      ConfigError: for an unknown kind, a number of devices that the mesh does not take, an explicit choice that cannot
        serve on it, or a bad assumption.
    """
    legal = ", ".join(hardware.DEVICES)
    if kind is None:
        raise _refused("--hardware", None, f"must be given: one of {legal}")
    device = hardware.lookup(kind)
    if device is None:
        near = _nearest(kind)
        raise _refused("--hardware", kind, f"not in the table{near and f'; the nearest: {near}'}; legal: {legal}")
    if devices is None:
        devices = _devices(config)
    mesh = resolve_mesh(config, devices)
    backend.check_choice(config.communication.backend, device.platform, device.name)
    share = Share(config, mesh, kernels.expected(config, mesh, device))
    assumed = assumptions.load(device, share.kernel, assumptions_file)
    return _planned(share, assumed, min(document_tokens or config.sequence_length, config.sequence_length))


def replanned(before: Plan, changes: Mapping[str, object], devices: int | None = None) -> Plan:
    """The same plan with some dotted keys changed, on as many devices unless told otherwise.

    Raises:
      ConfigError: where the config does not allow it.
    """
    sizes = {f"mesh.{axis}": size for axis, size in before.share.mesh.axes.items()}
    config = _with(before.config, {"mesh.simulate_devices": None, **sizes, **changes})
    mesh = resolve_mesh(config, devices or before.share.devices)  # which checks the whole
    whole_rows = before.document_tokens == before.config.sequence_length
    length = config.sequence_length if whole_rows else min(before.document_tokens, config.sequence_length)
    kernel = kernels.expected(config, mesh, before.device)
    return _planned(Share(config, mesh, kernel), before.assumed.with_kernel(kernel), length)


def _with(config: Config, changes: Mapping[str, object]) -> Config:
    """The config with values that are known to be legal each by itself: a hundred times as fast as reading it anew."""
    sections: dict[str, dict[str, object]] = {}
    top: dict[str, object] = {}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            top[name] = value
    copied = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=top | copied)


def _planned(share: Share, assumed: Assumptions, document_tokens: int) -> Plan:
    timed = timing.estimate(share, assumed, document_tokens)
    return Plan(share, assumed, document_tokens, memory.estimate(share), timed)


def _nearest(kind: str) -> str:
    """The kinds that may have been meant."""
    by_lower = {name.lower(): name for name in hardware.DEVICES}
    asked = kind.strip().lower()
    near = [lower for lower in by_lower if asked and lower.startswith(asked)]
    near = near or difflib.get_close_matches(asked, by_lower, n=2, cutoff=0.7)
    return " or ".join(by_lower[lower] for lower in near)


def _devices(config: Config) -> int:
    """The devices that a config asks for."""
    size, simulated = config.mesh.size, config.mesh.simulate_devices
    if size is not None:
        return size
    if isinstance(simulated, int):
        return simulated
    axis = next(axis for axis, size in config.mesh.axes.items() if size == -1)
    message = "takes all devices that are left; the plan has to be told how many there are: --devices N, or the axis"
    raise _refused(f"mesh.{axis}", -1, message)


def _refused(key: str, value: object, message: str) -> ConfigError:
    return ConfigError([Problem(key, value, message)], source="the plan")
