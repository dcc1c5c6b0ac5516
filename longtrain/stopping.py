"""Being told to stop: any of the signals, in any process, ends the run of all of them at the same step."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.errors import Preempted
from longtrain.parallel.mesh import AXES

# SIGTERM from schedulers and kill, SIGUSR1 as SLURM's warning before the time limit, SIGINT from the keyboard.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """What a signal does to a run: it is remembered, the step under way ends, the run saves and exits 75.

    Before its first step a single process has nothing to save and exits 75 at once (or as soon as XLA, which compiles
    without looking up, lets it); one of many goes on to the first step, where all learn of it. A SIGINT after any of
    the signals ends the process at once, unsaved.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._started = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals for the block's time."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def started(self) -> None:
        """From now on there is something to save: a signal is only remembered."""
        self._started = True

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self._started and jax.process_count() == 1:
            print(f"longtrain: stopped by {self.received} before the first step", file=sys.stderr, flush=True)
            raise SystemExit(Preempted.exit_code)  # no Exception, which whatever is under way might take for its own

    def votes(self, mesh: Mesh) -> jax.Array:
        """Int32 [devices], 1 on this process's devices once it was told to stop.

        The train step sums the votes of all devices and returns the sum with its metrics, so that every process learns
        of the request at the same step without a message of its own.
        """
        mine = np.full(mesh.size, self.received is not None, np.int32)
        return jax.make_array_from_callback(mine.shape, NamedSharding(mesh, P(AXES)), lambda index: mine[index])
