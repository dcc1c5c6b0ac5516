"""Times train steps on one backend. Run as a process of its own, since JAX takes its flags once:

    python -m longtrain.bench.worker CONFIG [KEY=VALUE …] --warmup N --steps N --result FILE

The rows are random tokens, one document each, placed once: neither data nor checkpoints are timed. The cluster's first
process writes FILE.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.config import Config, load
from longtrain.errors import LongtrainError
from longtrain.parallel import process

if TYPE_CHECKING:
    import numpy as np


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the failure, whose message is on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        config = load(options.config, options.overrides)
        process.prepare_environment(config)
        process.join_cluster(config)
        found = measure(config, options.warmup, options.steps)
        if process.is_first():
            options.result.write_text(json.dumps(found), encoding="utf-8")
    except LongtrainError as error:
        print(f"longtrain: {error}", file=sys.stderr)
        process.leave_cluster(error.exit_code)
        return error.exit_code
    return 0


def measure(config: Config, warmup: int, steps: int) -> dict[str, Any]:
    """Seconds of each step after the first `warmup`, from dispatch to the loss; every process of a cluster at once.

    Raises:
      ConfigError: when the config does not fit the devices, or a permute is not on the backend asked for.
      ClusterError: when permutes lose data.
    """
    import jax

    from longtrain.build import build
    from longtrain.plan import backends
    from longtrain.stopping import StopRequest

    built = build(config)
    process.wait_for_all("the self-test of permutes")
    built.check_permutes()
    step = built.train_step()
    collectives: list[str] = []
    backends.check(built, step, collectives.append)
    state, batch = built.initial_state(), built.place(rows(config))
    votes = StopRequest().votes(built.mesh)
    process.wait_for_all("the first step")
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        state, sums = step(state, batch, votes)
        jax.block_until_ready(sums)
        seconds.append(time.perf_counter() - started)
    return {"devices": built.mesh.size, "collectives": collectives, "step_seconds": seconds[warmup:]}


def rows(config: Config) -> "dict[str, np.ndarray]":
    """A batch of rows that one document fills, of random tokens."""
    import numpy as np

    shape = B, S = config.batch.sequences, config.sequence_length
    random = np.random.default_rng(config.run.seed)
    tokens, targets = (random.integers(0, config.model.vocab_size, shape, np.int32) for _ in range(2))
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), shape),
        "segments": np.ones(shape, np.int32),
        "weights": np.ones(shape, np.float32),
    }


if __name__ == "__main__":
    sys.exit(main())
