"""Jobs over the cores: in processes of their own, or here where there is one job or one core."""

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from longtrain.data.jobs import Job
from longtrain.data.processes import before_workers, cores, start_worker
from longtrain.data.tokenizing import Stopped, Work, tokenize
from longtrain.errors import DataError

Show = Callable[[int, int, int], None]
"""Gets the bytes read, documents and tokens done so far."""

_SHOWN_EVERY_SECONDS = 0.2
_STOP = 3
_COUNTERS = 4


class Unfinished(DataError):
    """Jobs ended early for no fault of the sources: the finished shards are good."""


class _SharedMeter:
    """Counters in memory that the parent and its workers share; the last one asks the workers to stop."""

    def __init__(self, counters: Any):
        self.counters = counters

    def add(self, read: int, documents: int, tokens: int) -> None:
        with self.counters.get_lock():
            for place, amount in enumerate((read, documents, tokens)):
                self.counters[place] += amount
            if self.counters[_STOP]:
                raise Stopped


def run(work: Work, jobs: Sequence[Job], numbers: Sequence[int], show: Show) -> None:
    """Make the shards of these numbers. The first error ends the others' jobs, and is raised.

    Raises DataError, OSError, and Unfinished where a process was killed.
    """
    # Not forked: the training process has threads by now, and jax in it.
    context = multiprocessing.get_context("spawn")
    meter = _SharedMeter(context.Array("q", _COUNTERS))
    processes = min(cores(), len(numbers))
    if processes <= 1:
        with _shown(meter, show):
            for number in numbers:
                tokenize(work, number, jobs[number], meter)
        return
    before_workers()
    with ProcessPoolExecutor(processes, context, _start, (work, meter.counters)) as pool:
        try:
            left: set[Future[None]] = {pool.submit(_job, number, jobs[number]) for number in numbers}
            while left:
                done, left = wait(left, _SHOWN_EVERY_SECONDS, FIRST_EXCEPTION)
                show(*meter.counters[:_STOP])
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise Unfinished("a process that tokenizes was killed, perhaps for want of memory") from error
        finally:
            meter.counters[_STOP] = 1
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _shown(meter: _SharedMeter, show: Show) -> Any:
    """Show the counters while the block works, from a thread, and once more after it."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(_SHOWN_EVERY_SECONDS):
            show(*meter.counters[:_STOP])

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        show(*meter.counters[:_STOP])


_of_this_process: tuple[Work, _SharedMeter]


def _start(work: Work, counters: Any) -> None:
    global _of_this_process
    start_worker()
    _of_this_process = work, _SharedMeter(counters)


def _job(number: int, job: Job) -> None:
    work, meter = _of_this_process
    tokenize(work, number, job, meter)
