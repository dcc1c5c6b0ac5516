"""Digests of a checkpoint's files: written by who wrote the files, compared by all."""

import json
import time
from pathlib import Path

import pytest

from longtrain import digests

ITEMS = ("parameters", "run")
FILES = {
    "parameters/ocdbt.process_0/d/aa": b"zero",
    "parameters/ocdbt.process_1/d/bb": b"one",
    "parameters/array_metadatas/process_1": b"shapes",
    "parameters/manifest.ocdbt": b"",
    "run/metadata": b"{}",
    "optimizer/d/cc": b"moments",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of two processes, step 7."""
    for name, content in FILES.items():
        path = tmp_path / "7" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "7"


def listed(checkpoint: Path, process: int) -> set[str]:
    return set(json.loads((checkpoint / f"digests.process_{process}.json").read_text())["files"])


def test_each_process_digests_what_it_wrote(checkpoint: Path):
    for process in (1, 0):  # the second finds the first's digests there
        digests.write(checkpoint, process, 2)
    theirs = {name for name in FILES if "process_1" in name}
    assert listed(checkpoint, 1) == theirs and listed(checkpoint, 0) == set(FILES) - theirs


def test_the_shares_of_all_processes_are_all_files(checkpoint: Path):
    for process in (0, 1):
        digests.write(checkpoint, process, 2)
    assert digests.verify(checkpoint, ITEMS, 0, 1).startswith("5 files, 15 bytes, are what was written")
    counts = [int(digests.verify(checkpoint, ITEMS, share, 3).split()[0]) for share in range(3)]
    assert sum(counts) == 5 and max(counts) == 2


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("optimizer")])
def test_any_change_of_any_file_of_the_items_is_named(checkpoint: Path, name: str):
    for process in (0, 1):
        digests.write(checkpoint, process, 2)
    (checkpoint / name).write_bytes(bytes(byte ^ 4 for byte in FILES[name]) or b"\0")
    with pytest.raises(ValueError, match=name):
        digests.verify(checkpoint, ITEMS, 0, 1)
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        digests.verify(checkpoint, ITEMS, 0, 1)


def test_what_is_of_no_item_asked_for_is_not_read(checkpoint: Path):
    digests.write(checkpoint, 0, 1)
    (checkpoint / "optimizer/d/cc").unlink()
    digests.verify(checkpoint, ITEMS, 0, 1)


def test_digests_that_were_never_written_are_told_of(checkpoint: Path):
    assert "NOT VERIFIED: digests.process_0.json not there" in digests.verify(checkpoint, ITEMS, 0, 1)
    digests.write(checkpoint, 1, 2)
    assert "2 files" in (said := digests.verify(checkpoint, ITEMS, 0, 1)) and "digests.process_0.json not" in said


def test_damaged_digests_are_named(checkpoint: Path):
    digests.write(checkpoint, 0, 1)
    (checkpoint / "digests.process_0.json").write_text('{"processes": 1, "fi')
    with pytest.raises(ValueError, match="digests.process_0.json is not what was written"):
        digests.verify(checkpoint, ITEMS, 0, 1)


def test_a_digester_waits_for_the_checkpoint_to_be_complete(checkpoint: Path):
    unfinished = checkpoint.rename(checkpoint.parent / "7.tmp")
    digester = digests.Digester(checkpoint.parent, 0, 2)
    digester.after(7)
    time.sleep(2 * digests.POLL_SECONDS)
    assert not (checkpoint / "digests.process_0.json").exists()
    unfinished.rename(checkpoint)
    digester.wait()
    assert listed(checkpoint, 0) == {name for name in FILES if "process_1" not in name}
    digester.after(8)  # never complete
    digester.close()


def test_digests_that_cannot_be_written_fail_the_wait(checkpoint: Path):
    (checkpoint / "digests.process_0.tmp").mkdir()
    digester = digests.Digester(checkpoint.parent, 0, 1)
    digester.after(7)
    with pytest.raises(OSError):
        digester.wait()
    digester.close()
