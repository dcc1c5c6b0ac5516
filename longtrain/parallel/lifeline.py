"""The pipe between a worker and the supervisor that started it: who is silent on it is taken for stuck, or gone.

The worker writes a byte a second from a thread of its own: a process that is stopped, or whose threads can no longer
run, writes none. Where nobody reads any more the supervisor was killed, and the worker, whom no signal would reach
now, ends too.
"""

import os
import threading
import time
from collections.abc import MutableMapping

from longtrain.errors import ClusterError

VARIABLE = "LONGTRAIN_LIFELINE"
"""Environment variable with the number of the pipe's end to write to; a process that has it is a worker."""

BEAT_SECONDS = 1.0


def is_worker(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a supervisor started this process."""
    return VARIABLE in environment


def hold(environment: MutableMapping[str, str] = os.environ) -> None:
    """Begins to write. Takes the variable out of the environment: the worker's own children are no workers."""
    pipe = int(environment.pop(VARIABLE))
    os.set_inheritable(pipe, False)
    threading.Thread(target=_beat, args=(pipe,), name="lifeline", daemon=True).start()


def _beat(pipe: int) -> None:
    while True:
        try:
            os.write(pipe, b".")
        except OSError:
            os._exit(ClusterError.exit_code)
        time.sleep(BEAT_SECONDS)
