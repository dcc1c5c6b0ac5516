"""The processes that read and tokenize beside the training one."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from multiprocessing import resource_tracker

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler or a keyboard sends to the whole group."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_worker(*_: object) -> None:
    """In a worker process: leave signals to the parent, which ends the workers; if it is killed, end too."""
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with_parent(sentinel: int = parent.sentinel) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def before_workers() -> None:
    """In a parent, before its first worker: start the process that multiprocessing itself keeps beside them, deaf to
    the same signals. Left alone, it would hear SIGUSR1 and die of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)  # what is blocked stays so in a new process
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
