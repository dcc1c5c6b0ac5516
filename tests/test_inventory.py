"""`checkpoints RUN`: what lies in the folder, what a rule deletes, what reading it finds, how far weights are apart."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from longtrain import difference, digests, inventory
from longtrain.errors import CheckpointError, ConfigError
from longtrain.inventory import Rule


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with complete steps 2, 4, 6, 10, one that lacks its optimizer, one set aside, one that was being saved."""
    folder = tmp_path / "run" / "checkpoints"
    for name in ("2", "4", "6", "10", "8", "damaged-12", "14.orbax-checkpoint-tmp"):
        for item in inventory.ITEMS:
            (folder / name / item).mkdir(parents=True)
            (folder / name / item / "data").write_bytes(b"x" * 100)
        digests.write(folder / name, process=0, processes=1)
    shutil.rmtree(folder / "8" / "optimizer")
    lines = [{"step": 4, "loss": 2.5}, {"step": 4, "eval_loss": 2.75}, {"step": 6, "loss": 2.25}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '[3]\n{"loss": 1.0}\n{"step": 7, "lo'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    return tmp_path / "run"


def names(found: list[inventory.Entry]) -> list[str]:
    return [one.path.name for one in found]


def test_everything_in_the_folder_is_told_for_what_it_is(run_dir):
    found = {one.path.name: one for one in inventory.entries(run_dir)}
    assert list(found) == ["2", "4", "6", "8", "10", "14.orbax-checkpoint-tmp", "damaged-12"]
    states = {name: one.state for name, one in found.items()}
    assert states["8"] == "incomplete: no optimizer"
    assert states["14.orbax-checkpoint-tmp"] == inventory.UNFINISHED
    assert states["damaged-12"] == inventory.SET_ASIDE
    assert {states[name] for name in ("2", "4", "6", "10")} == {inventory.COMPLETE}
    assert (found["4"].loss, found["4"].eval_loss, found["6"].loss, found["2"].loss) == (2.5, 2.75, 2.25, None)
    assert found["2"].bytes > 300
    assert "loss 2.5000  eval 2.7500" in str(found["4"])


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        ("keep=1", ["2", "4", "6"]),
        ("keep=3", ["2"]),
        ("keep=9", []),
        ("keep=1,every=4", ["2", "6"]),
        ("leftovers", ["8", "14.orbax-checkpoint-tmp", "damaged-12"]),
    ],
)
def test_a_rule_takes_what_it_says_and_never_the_newest(run_dir, rule, taken):
    found = inventory.entries(run_dir)
    assert names(Rule.parse(rule).takes(found)) == taken
    said: list[str] = []
    inventory.delete(run_dir, Rule.parse(rule).takes(found), said.append)
    assert names(inventory.entries(run_dir)) == [name for name in names(found) if name not in taken]
    assert len(said) == len(taken)


@pytest.mark.parametrize("rule", ["keep=0", "keep=-1", "all", "keep=2,every=0", "every=3", ""])
def test_another_rule_is_refused_with_the_legal_ones(rule):
    with pytest.raises(ConfigError, match="legal: keep=N"):
        Rule.parse(rule)


def test_nothing_is_deleted_while_the_run_lives(run_dir):
    found = inventory.entries(run_dir)
    program = (
        "import pathlib, sys; from longtrain import runlock\n"
        "with runlock.held(pathlib.Path(sys.argv[1]), print): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None and living.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is training in"):
            inventory.delete(run_dir, found[:1], print)
        living.communicate("\n")
    assert names(inventory.entries(run_dir)) == names(found)


def test_what_cannot_be_deleted_is_told(run_dir):
    found = inventory.entries(run_dir)
    with pytest.raises(CheckpointError, match="2: cannot be deleted"):
        inventory.delete(run_dir, [found[0], found[0]], print)


def test_reading_it_all_finds_a_flipped_bit_and_missing_digests(run_dir):
    found = {one.path.name: one for one in inventory.entries(run_dir)}
    assert inventory.verify(found["2"])[0]
    data = found["2"].path / "optimizer" / "data"
    data.write_bytes(b"y" + data.read_bytes()[1:])
    whole, said = inventory.verify(found["2"])
    assert not whole and "optimizer/data is not what was written" in said
    next(found["4"].path.glob("digests.*")).unlink()
    whole, said = inventory.verify(found["4"])
    assert not whole and "NOT VERIFIED" in said


def weights(run_dir: Path, step: int, tree: dict) -> None:
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(run_dir / "checkpoints" / str(step) / "parameters", tree)


def test_weights_are_compared_one_by_one(tmp_path):
    run = tmp_path / "run"
    ours = {"embed": np.array([3.0, 4.0]), "layers": {"q": np.ones((2, 2)), "k": np.zeros(3), "old": np.ones(1)}}
    theirs = {"embed": np.array([3.0, 4.5]), "layers": {"q": np.ones((2, 3)), "k": np.zeros(3), "new": np.ones(1)}}
    weights(run, 1, ours)
    weights(run, 2, theirs)
    first, second = (difference.named(text, run) for text in ("1", f"{run}:2"))
    found = {one.name: one for one in difference.differences(first, second)}
    assert (found["embed"].largest, found["embed"].relative) == (0.5, pytest.approx(0.1))
    assert (found["layers.k"].largest, found["layers.k"].relative) == (0, 0)
    assert found["layers.q"].note == "shapes (2, 2) and (2, 3)"
    assert "not in" in found["layers.old"].note and "not in" in found["layers.new"].note
    with pytest.raises(CheckpointError, match="--diff 3: no complete checkpoint"):
        difference.named("3", run)
