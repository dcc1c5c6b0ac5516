"""`bench collectives`: the reference table's configs, what is refused and why, what is timed and how it is told."""

import json
from pathlib import Path

import pytest
import yaml

from longtrain import bench
from longtrain.bench import dry, report
from longtrain.config import load
from longtrain.errors import ConfigError
from longtrain.parallel import process
from longtrain.plan import estimate, targets
from runs import Workspace

FOLDER = Path(__file__).parent.parent / "configs" / "benchmarks"
ROWS = sorted(FOLDER.glob("*.yaml"))


def test_every_published_row_is_a_config_and_every_config_a_published_row():
    shapes = set()
    for path in ROWS:
        config = load(path)
        shapes.add((config.sequence_length, config.mesh.size, config.mesh.tensor))
        assert config.run.name == path.stem
        assert (config.model.preset, config.data.packing) == ("llama3_8b", "one")
    published = {
        (row["sequence_length"], devices, row["tensor"])
        for row in report.published()["rows"]
        for devices in row["devices"]
    }
    assert shapes == published


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_a_row_fits_where_it_was_published(path):
    plan = estimate.plan(load(path), "GB200")
    assert plan.fits
    if plan.config.sequence_length == 262144:
        assert plan.config.sequence_length // plan.config.mesh.context == 16384


@pytest.mark.parametrize(
    ("jaxlib", "served", "says"),
    [
        ((0, 9, 2), ["nccl", "nvshmem"], "0.12 and later have"),
        ((0, 10, 1), ["nccl", "nvshmem"], "0.12 and later have"),
        ((0, 10, 2), ["nccl"], "0.6.2 to 0.10.1 can; 0.10.2 ignores the flag"),
        ((0, 12, 0), ["nccl", "nccl_symmetric"], "0.6.2 to 0.10.1 can"),
    ],
)
def test_a_backend_that_this_jaxlib_has_not_is_refused_with_those_that_have(monkeypatch, jaxlib, served, says):
    monkeypatch.setattr(process, "jaxlib_version", lambda: jaxlib)
    found = bench.configs([str(ROWS[0])], [], bench.BACKENDS)
    assert [one.backend for one in found if not one.refused] == served
    assert any(says in one.refused for one in found)


def timed(backend: str, *seconds: float, path: Path = FOLDER / "llama3_8b_256k_32gpus.yaml") -> bench.Timed:
    config = load(path, [f"communication.backend={backend}"])
    return bench.Timed(str(path), backend, config, devices=32, step_seconds=list(seconds))


def test_the_table_compares_medians_and_shows_what_was_published(capsys):
    slow, fast = timed("nccl", 9.0, 4.0, 4.2), timed("nvshmem", 3.0, 3.5, 2.0)
    assert report.faster(fast, slow) == pytest.approx(100 * (4.2 / 3.0 - 1))
    assert report.faster(slow, slow) is None
    assert fast.tokens_per_second_per_device == pytest.approx(262144 / 3.0 / 32)
    assert report.faster_as_published(fast) == "+30.4 to +36.3 %"
    assert report.faster_as_published(slow) == ""
    assert report.faster_as_published(timed("nvshmem", path=FOLDER / "llama3_8b_128k_32gpus.yaml")) == "+2.4 %"
    report.show([slow, fast])
    said = capsys.readouterr().out
    assert "+40.0 %" in said and "+30.4 to +36.3 %" in said and "NVIDIA, February 2026" in said


@pytest.mark.slow
def test_the_command_times_what_can_be_had_and_tells_of_the_rest(workspace: Workspace):
    counts = ("--warmup", "1", "--steps", "2", "--repeats", "2")
    said = workspace.run(
        "bench", "collectives", "config.yaml", "--backends", "auto,nvshmem", *counts, "--json", "b.json", "run.seed=1"
    )
    ours, refused = json.loads((workspace.folder / "b.json").read_text())
    assert len(ours["step_seconds"]) == 4 and min(ours["step_seconds"]) > 0
    assert ours["median_step_seconds"] == pytest.approx(sum(sorted(ours["step_seconds"])[1:3]) / 2)
    assert ours["tokens_per_second_per_device"] == pytest.approx(4 * 64 / ours["median_step_seconds"] / 2)
    assert "simulated CPU devices have no GPU collectives" in refused["refused"] and not refused["step_seconds"]
    assert "config on auto, 2 of 2" in said
    assert not (workspace.folder / "runs").exists()


@pytest.mark.slow
def test_what_cannot_be_timed_says_why_and_the_rest_is_timed(workspace: Workspace):
    tree = yaml.safe_load((workspace.folder / "config.yaml").read_text()) | {"mesh": {"context": 2}}
    (workspace.folder / "real.yaml").write_text(yaml.safe_dump(tree))
    options = ("--backends", "auto", "--warmup", "1", "--steps", "1", "--repeats", "1", "--json", "both.json")
    said = workspace.run("bench", "collectives", "real.yaml", "config.yaml", *options, code=1)
    assert "could not be timed: real on auto" in said and "exit 6: " in said
    assert "asks for real devices, but JAX finds only the CPU" in " ".join(said.split())
    real, ours = json.loads((workspace.folder / "both.json").read_text())
    assert real["failed"] and not real["step_seconds"] and len(ours["step_seconds"]) == 1
    said = workspace.run("bench", "collectives", "config.yaml", code=1)
    assert "nothing could be timed" in said


@pytest.mark.slow
@pytest.mark.ahead_of_time
def test_a_row_compiles_on_the_backend_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is kept from before proves nothing
    try:
        targets.target("GB200", 4)
    except ConfigError as error:
        pytest.skip(str(error))
    found = dry.compile_all([str(FOLDER / "llama3_8b_64k_4gpus.yaml")], [], bench.BACKENDS, "GB200", print)
    for one in found:
        assert one.timed.refused or (one.permutes == one.timed.backend and one.found is not None and one.found.fits)
    assert [one.timed.backend for one in found if not one.timed.refused][0] == "nccl"
    assert len([one for one in found if not one.timed.refused]) == 2
    report.show_compiled(found)
