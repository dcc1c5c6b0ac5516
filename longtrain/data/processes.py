"""The processes that read and tokenize beside the training one."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_worker(*_: object) -> None:
    """In a worker process: leave signals to the parent, which ends the workers; if it is killed, end too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # a scheduler sends them to the whole group
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with_parent(sentinel: int = parent.sentinel) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
