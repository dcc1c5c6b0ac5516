"""A parent around each worker of a cluster, which has no jax in it and so outlives what jax does to the worker.

When a peer dies, JAX's coordination service ends the healthy processes by SIGABRT, before Python could say a word; a
worker that is stopped, or stuck where no thread of Python runs, says nothing at all. The supervisor turns both into
exit code 6 and a message. It passes every signal on, and what the worker writes; of the worker's own exit code it
changes nothing.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from longtrain.errors import ClusterError
from longtrain.parallel import lifeline
from longtrain.parallel.cluster import Cluster

# Those that somebody sends on purpose and a process may catch. The worker is in a process group of its own, so that
# Ctrl-C, which a terminal sends to a whole group, comes to it once: a second one would end it unsaved.
PASSED_ON = tuple(
    getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT")
)

ROUND_SECONDS = 5.0

# What JAX's coordination service writes as it ends a process (jaxlib 0.10 and 0.12).
_OF_THE_SERVICE = re.compile(r"JAX distributed service|coordination service", re.I)
_SILENT = re.compile(r"stopped sending heartbeats\):\s*([\d\s,]+)|Task (\d+) heartbeat timeout|task:(\d+)")
_LEADER = re.compile(r"Failed to send RPC to coordination service|RPC: \S+/Heartbeat")
_NOT_ALL_CAME = re.compile(r"RegisterTask")


def supervise(arguments: Sequence[str], cluster: Cluster, timeout_seconds: float) -> int:
    """Runs `longtrain ARGUMENTS` as this process's worker.

    Args:
      timeout_seconds: silence after which the worker is killed as stuck.

    Returns:
      The exit code: the worker's own, or 6 where it did not end of itself. Does not return when the worker died of a
      signal that was passed on: this process then dies of the same.
    """
    worker = _Worker([sys.executable, "-m", "longtrain", *arguments])
    stuck = worker.wait(timeout_seconds)
    code = worker.process.returncode
    if code >= 0:
        return code
    if -code in worker.passed_on and not stuck:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if stuck:
        why = f"its worker gave no sign of life for {timeout_seconds:g} s (cluster.timeout_seconds) and was killed"
    else:
        why = _cause(signal.Signals(-code), worker.words, cluster)
    print(f"longtrain: process {cluster.process} of {cluster.processes}: {why}", file=sys.stderr, flush=True)
    return ClusterError.exit_code


def _cause(number: signal.Signals, words: list[str], cluster: Cluster) -> str:
    """Why the worker died of a signal that nobody passed on, as far as JAX's service has said."""
    said = "".join(words)
    if number != signal.SIGABRT or not _OF_THE_SERVICE.search(said):
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        return f"its worker was ended by {number.name}{hint}; the other processes cannot go on without it"
    named = {int(task) for groups in _SILENT.findall(said) for group in groups for task in re.findall(r"\d+", group)}
    if others := sorted(named - {cluster.process}):
        peers = f"process {others[0]}" if len(others) == 1 else f"processes {', '.join(map(str, others))}"
        return f"a peer died or is stuck: {peers} (JAX's coordination service ended this one)"
    if cluster.process and _LEADER.search(said):
        return (
            f"a peer died or is stuck: process 0, whose coordination service at {cluster.coordinator} does not answer"
        )
    if _NOT_ALL_CAME.search(said):
        waited = "not all processes came in time (cluster.timeout_seconds)"
        return f"{waited}: is each started, with the address {cluster.coordinator} and the same number of processes?"
    return "a peer died or is stuck: JAX's coordination service ended this process and does not say which"


class _Worker:
    """The worker's process, what it wrote last to stderr, and the signals it was sent through this one."""

    KEPT_LINES = 200

    def __init__(self, command: list[str]):
        self.words: list[str] = []
        self.passed_on: set[int] = set()
        self._early: list[int] = []
        self.process: subprocess.Popen[bytes] = None  # type: ignore[assignment]  # until it is started, just below
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        self._beats, end = os.pipe()
        self.process = subprocess.Popen(
            command,
            env=os.environ | {lifeline.VARIABLE: str(end)},
            stderr=subprocess.PIPE,
            pass_fds=[end],
            start_new_session=True,
        )
        os.close(end)
        for number in self._early:
            self.process.send_signal(number)
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.passed_on.add(number)
        if self.process is None:
            self._early.append(number)
        else:
            self.process.send_signal(number)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            with contextlib.suppress(OSError, ValueError):  # nobody reads ours: the worker shall not feel it
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            self.words = [*self.words[-self.KEPT_LINES :], line.decode(errors="replace")]

    def wait(self, silence_seconds: float) -> bool:
        """Waits for the worker's end, and all of its children's; whether it had to be killed for its silence."""
        stuck = False
        for silent in self._silences():
            if silent >= silence_seconds:
                stuck = True
                break
        if not stuck:
            try:  # the pipe closes just before the end
                self.process.wait(silence_seconds)
            except subprocess.TimeoutExpired:
                stuck = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(ROUND_SECONDS)
        return stuck

    def _silences(self) -> Iterator[float]:
        """Seconds without a beat, again and again, until the worker has closed the pipe.

        Counted in rounds of this process's own waiting: a machine that slept has heard nothing either.
        """
        silent = 0.0
        while True:
            ready, _, _ = select.select([self._beats], [], [], ROUND_SECONDS)
            if ready and not os.read(self._beats, 4096):
                return
            silent = 0.0 if ready else silent + ROUND_SECONDS
            yield silent
