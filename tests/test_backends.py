"""What a run says of its compiled step's collectives, and refuses."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from longtrain.errors import ConfigError
from longtrain.parallel import backend
from longtrain.plan import backends
from programs.toys import MESH
from tiny import config

RING = (Path(__file__).parent / "programs" / "ring.GB200.0.12.0.1.hlo").read_text(encoding="utf-8")
# As jaxlib 0.9 and 0.10.1 write it with NVSHMEM, and 0.12 with symmetric memory.
NVSHMEM = RING.replace('"backend":"DEFAULT"', '"backend":"NVSHMEM"')
SYMMETRIC = re.sub(r'"collectives_mode":"\w+"', '"collectives_mode":"COLLECTIVES_SYMMETRIC_MEMORY"', RING)


def checked(asked: str, program: str, platform: str = "gpu") -> list[str]:
    """What is said of a program on a mesh of fsdp 2 x context 4."""
    devices = np.array([SimpleNamespace(platform=platform)])
    built = SimpleNamespace(
        mesh=SimpleNamespace(devices=devices, shape=MESH), config=config(f"communication.backend={asked}")
    )
    said: list[str] = []
    backends.check(built, SimpleNamespace(as_text=lambda: program), said.append)
    return said


@pytest.mark.parametrize(
    ("asked", "program", "got"),
    [
        ("auto", RING, "nccl"),
        ("auto", NVSHMEM, "nvshmem"),
        ("nccl", RING, "nccl"),
        ("nvshmem", NVSHMEM, "nvshmem"),
        ("nccl_symmetric", SYMMETRIC, "nccl_symmetric"),
    ],
)
def test_it_says_who_carries_each_kind(asked: str, program: str, got: str):
    assert checked(asked, program) == [f"collective-permute on {got}: 3 a step, of up to 4.0 MiB a device"]


@pytest.mark.parametrize(
    ("asked", "program", "got"),
    [("nvshmem", RING, "nccl"), ("nccl_symmetric", RING, "nccl"), ("nccl", NVSHMEM, "nvshmem")],
)
def test_another_backend_than_asked_is_refused(asked: str, program: str, got: str):
    with pytest.raises(ConfigError, match=f"communication.backend = '{asked}': .*carried by {got} and not by {asked}"):
        checked(asked, program)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_where_there_is_no_choice_nothing_is_said(platform: str):
    assert checked("auto", "no program at all", platform) == []


def test_a_program_in_a_form_that_is_new_ends_no_run_that_asked_for_nothing():
    new = re.sub(r"source_target_pairs=\{.*?\}\}", "replica_groups=<new>", RING)
    (line,) = checked("auto", new)
    assert "cannot be read from the compiled step" in line
    with pytest.raises(ConfigError, match="communication.backend = 'nvshmem': .*communication.backend=auto goes on"):
        checked("nvshmem", new)


def test_nvshmem_is_refused_where_a_process_has_several_gpus():
    with pytest.raises(ConfigError, match="needs one process for each GPU, and this one has 4"):
        backend.check_processes("nvshmem", "gpu", 4)
    backend.check_processes("nvshmem", "gpu", 1)
    backend.check_processes("nccl", "gpu", 4)
    backend.check_processes("auto", "cpu", 8)
