"""Being told to stop: any of the signals, in any process, ends the run of all of them at the same step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.parallel.mesh import AXES

# SIGTERM from schedulers and kill, SIGUSR1 as SLURM's warning before the time limit, SIGINT from the keyboard.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers that a signal asked the run to stop. A SIGINT after that ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def votes(self, mesh: Mesh) -> jax.Array:
        """Int32 [devices], 1 on this process's devices once it was told to stop.

        The train step sums the votes of all devices and returns the sum with its metrics, so that every process learns of
        the request at the same step without a message of its own.
        """
        mine = np.full(mesh.size, self.received is not None, np.int32)
        return jax.make_array_from_callback(mine.shape, NamedSharding(mesh, P(AXES)), lambda index: mine[index])
