"""What a run needs besides arithmetic: its devices, links that lose nothing, clocks that agree, room on the disk."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from longtrain import __version__
from longtrain.build import Build, build
from longtrain.config import Config
from longtrain.doctor.checks import Check
from longtrain.errors import ClusterError
from longtrain.parallel import process

WRITTEN_BYTES = 64 * 2**20
CLOCK_SECONDS = 5.0
"""How far apart the hosts' clocks may be: logs and checkpoints' ages are compared by them."""


def checks(config: Config) -> Iterator[Check]:
    """Every process of the cluster must run them all.

    Raises:
      ConfigError: when the config does not fit the devices, or an explicit choice cannot serve.
    """
    yield _versions()
    built = build(config)
    devices = built.mesh.devices.flatten()
    sizes = " x ".join(f"{axis} {size}" for axis, size in built.mesh.shape.items())
    detail = f"{sizes} on {devices.size} x {devices[0].device_kind}, {jax.process_count()} process(es)"
    yield Check("devices", True, f"{detail}; {'; '.join(built.choices)}")
    yield Check("XLA flags", True, os.environ.get("XLA_FLAGS") or "none")
    yield _permutes(built)
    if jax.process_count() > 1:
        yield _clocks()
    yield _disk(config, built)


def _versions() -> Check:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return Check("versions", True, f"longtrain {__version__}, Python {platform.python_version()}, {versions}")


def _permutes(built: Build) -> Check:
    process.wait_for_all("the self-test of permutes")
    try:
        built.check_permutes()
    except ClusterError as error:
        return Check("permutes", False, " ".join(str(error).split()))
    return Check("permutes", True, "what each device sends round the mesh's axes arrives")


def _clocks() -> Check:
    process.wait_for_all("the clocks")
    # As whole seconds and microseconds: float64 would come back as float32.
    whole, part = divmod(time.time_ns() // 1000, 10**6)
    told = process_allgather(np.array([whole % 2**31, part], np.int32)).astype(np.float64)
    seconds = told[:, 0] + told[:, 1] / 1e6
    spread = float(seconds.max() - seconds.min())
    detail = f"{spread:.2f} s apart, the wait for each other in it; at most {CLOCK_SECONDS:.0f}"
    return Check("clocks", spread <= CLOCK_SECONDS, detail)


def _disk(config: Config, built: Build) -> Check:
    """Room for the checkpoints that are kept and one being written, and how fast one is written from here."""
    name, folder = "output folder", config.run_dir
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built.state))
    try:
        free = shutil.disk_usage(there).free
        rate = _write_rate(there)
    except OSError as error:
        return Check(name, False, f"{there} cannot be written: {error.strerror or error}")
    needed = (config.checkpoint.keep + 1) * state
    detail = (
        f"{there}: {free / 2**30:,.1f} GiB free; {config.checkpoint.keep} checkpoints kept and one in the making take "
        f"{needed / 2**30:,.1f} GiB; written at {rate / 2**20:,.0f} MiB/s by one process"
    )
    if free < needed:
        return Check(name, False, f"{detail}. This means: the disk is full before checkpoint.keep are on it")
    return Check(name, True, detail)


def _write_rate(folder: Path) -> float:
    """Bytes a second of one file, until it is on the disk."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - start)
