"""Ends a run that no longer moves: all stacks are dumped, and whoever lags behind is named."""

import faulthandler
import os
import sys
import threading
import time

from longtrain.errors import ClusterError
from longtrain.parallel import process

_PROGRESS = "longtrain/step"


class Watchdog:
    """Watches the run's main thread from one of its own. Close it.

    Every process of a cluster publishes the step it is at, so that when time is up the others can say who has not come
    as far: the one that hangs, where it was no collective that lost a message.

    Args:
      seconds: longest time between two calls of `watch`, else the process ends with exit code 6.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._poll = min(1.0, seconds / 4)
        self._doing, self._step = "the first step", 0
        self._since = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, doing: str, step: int) -> None:
        """From now on the main thread does this, for this step; it has the whole time for it."""
        self._doing, self._step, self._since = doing, step, time.monotonic()

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        published = None
        while not self._closed.wait(self._poll):
            if published != self._step:
                published = self._step
                process.publish(_PROGRESS, str(published))
            if time.monotonic() - self._since > self._seconds:
                self._bite()

    def _bite(self) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        message = (
            f"{self._doing} has not ended in {self._seconds:g} s (guard.step_timeout_seconds); every stack is above"
        )
        behind = {who: int(step) for who, step in process.published(_PROGRESS).items() if int(step) < self._step}
        if behind:
            who = ", ".join(f"process {number} at step {step}" for number, step in sorted(behind.items()))
            message += f"; not yet at step {self._step}: {who}"
        print(f"longtrain: {message}", file=sys.stderr, flush=True)
        os._exit(ClusterError.exit_code)
