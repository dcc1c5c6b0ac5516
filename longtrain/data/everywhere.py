"""Prepared data in every process of a cluster, and the same in all."""

import jax

from longtrain.config import Config
from longtrain.data.prepare import Log, Prepared, ensure
from longtrain.errors import DataError
from longtrain.parallel import process

_LONGEST_PREPARING_SECONDS = 30 * 24 * 3600
"""On disks of their own, hosts may take very different times. That one died, JAX's own heartbeats find."""


def ensure_everywhere(config: Config, log: Log) -> Prepared:
    """As `ensure`, in every process of the cluster, which all must call it. No collective runs while one prepares.

    Raises DataError, in all processes, where they have not all the same data, and what `ensure` raises.
    """
    prepared = ensure(config, log, process_index=jax.process_index())
    process.wait_for_all("the data", seconds=_LONGEST_PREPARING_SECONDS)
    if others := process.differing(prepared.fingerprint):
        raise DataError(
            f"processes {', '.join(map(str, others))} have other data than process 0 in data.prepared_dir = "
            f"{config.data.prepared_dir}: data.sources and data.tokenizer must be the same files on every host"
        )
    return prepared
