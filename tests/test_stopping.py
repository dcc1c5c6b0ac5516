"""Signals to a run that has begun: the first is remembered, a SIGINT after it ends the process at once."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from longtrain.stopping import StopRequest
stop = StopRequest()
with stop.listening():
    stop.started()
    os.kill(os.getpid(), signal.{first})
    print(stop.received, flush=True)
    os.kill(os.getpid(), signal.{second})
    print("still here", flush=True)
"""


@pytest.mark.parametrize(
    ("first", "second", "code", "says"),
    [
        ("SIGTERM", "SIGTERM", 0, "SIGTERM\nstill here\n"),
        ("SIGUSR1", "SIGTERM", 0, "SIGUSR1\nstill here\n"),
        ("SIGINT", "SIGINT", -signal.SIGINT, "SIGINT\n"),
        ("SIGTERM", "SIGINT", -signal.SIGINT, "SIGTERM\n"),
    ],
)
def test_signals(first: str, second: str, code: int, says: str):
    program = PROGRAM.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, says)
