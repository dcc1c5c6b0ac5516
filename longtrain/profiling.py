"""A profiler trace of chosen steps (`metrics.profile`), for XProf or TensorBoard."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from longtrain.config import Config


class Trace:
    """Starts the profiler before the first chosen step and ends it after the last."""

    def __init__(self, folder: str, steps: tuple[int, int] | None):
        self._folder, self._steps = folder, steps
        self.running = False

    def before_step(self, step: int) -> None:
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self.running:
            jax.profiler.start_trace(self._folder)
            self.running = True

    def after_step(self, step: int, outputs: Any) -> None:
        """`outputs` are waited for, so that the last step is in the trace whole."""
        if self.running and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(outputs)
            self.stop()

    def stop(self) -> None:
        jax.profiler.stop_trace()
        self.running = False


def too_late(config: Config, steps_done: int) -> bool:
    """Whether the chosen steps are all among those that are done already, as after a resume."""
    return config.metrics.profile is not None and config.metrics.profile[1] <= steps_done


@contextmanager
def traced(config: Config) -> Iterator[Trace]:
    """The run's trace; ended with the block, however that ends."""
    trace = Trace(str(config.run_dir / "profile"), config.metrics.profile)
    try:
        yield trace
    finally:
        if trace.running:
            trace.stop()
