"""The doctor: what it shrinks stays what it is, it finds agreement where there is, and a broken run is not passed."""

import json
from pathlib import Path

import numpy as np
import pytest

import tiny
from longtrain import doctor
from longtrain.config import load
from longtrain.doctor import agreement, shrink, surroundings
from longtrain.doctor.agreement import Observed
from longtrain.doctor.checks import Check
from longtrain.errors import CheckFailed
from runs import Workspace
from test_mutants import MUTANTS, broken

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
EIGHT = ("mesh.simulate_devices=8", "batch.sequences=8")
ALL_AXES = (*EIGHT, "mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "batch.accumulation=4")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shrunk_config_is_computed_as_the_whole_one(path, monkeypatch):
    config = load(path, ["mesh.simulate_devices=auto"])
    monkeypatch.setattr(shrink.jax, "devices", lambda: [None] * config.mesh.size)
    small = shrink.shrunk(config)
    assert small.mesh == config.mesh
    assert small.attention == config.attention
    assert small.memory.remat == config.memory.remat
    assert small.model.num_heads == config.model.num_heads
    assert small.model.num_kv_heads == config.model.num_kv_heads
    assert small.model.rope == config.model.rope
    assert small.model.compute_dtype == config.model.compute_dtype
    assert (small.batch.accumulation > 1) == (config.batch.accumulation > 1)
    assert small.sequence_length < 5000


@pytest.mark.parametrize("packing", ["best_fit", "concat", "one"])
def test_the_rows_have_documents_of_any_kind(packing):
    config = shrink.shrunk(tiny.config(*ALL_AXES, f"data.packing={packing}"))
    rows = shrink.batch(config)
    segments, positions, weights = rows["segments"], rows["positions"], rows["weights"]
    assert segments.shape == (config.batch.sequences, config.sequence_length)
    for row, (row_segments, row_positions) in enumerate(zip(segments, positions, strict=True)):
        documents = row_segments.max()
        assert documents == (0 if row == len(segments) - 1 else 1) or (packing != "one" and documents > 1)
        for number in range(1, documents + 1):
            (places,) = np.nonzero(row_segments == number)
            assert (np.diff(places) == 1).all()
            assert row_positions[places].tolist() == list(range(len(places)))
    assert not weights[segments == 0].any()
    assert weights.any() and not weights[segments > 0].all()
    if packing != "one":
        lengths = [np.count_nonzero(row == number) for row in segments for number in range(1, row.max() + 1)]
        assert 1 in lengths


def test_a_difference_beyond_rounding_is_no_agreement():
    values = {"loss": np.float32(2), "grad_norm": np.float32(1), "layers.q": np.array([1.0, -4.0])}
    other = values | {"layers.q": np.array([1.0, -4.004])}
    limits = dict.fromkeys(values, 1e-4)
    assert agreement._check("same", Observed(values), Observed(values), limits, "nothing").ok
    found = agreement._check("other", Observed(other), Observed(values), limits, "the heads are mixed up")
    assert not found.ok
    assert "beyond rounding: layers.q by 1.0e-03" in found.detail and "the heads are mixed up" in found.detail
    assert agreement._check("noisy", Observed(other), Observed(values), limits | {"layers.q": 1e-2}, "").ok


@pytest.mark.parametrize("spoiled", [np.zeros(2), np.array([1.0, np.nan])], ids=["all zero", "NaN"])
def test_where_there_is_nothing_to_compare_there_is_no_agreement(spoiled):
    values = {"loss": np.float32(2), "grad_norm": np.float32(1), "layers.q": spoiled}
    found = agreement._check("", Observed(values), Observed(values), dict.fromkeys(values, 1e-4), "")
    assert not found.ok and "nothing to compare: layers.q" in found.detail


def test_a_disk_too_small_is_told(tmp_path, monkeypatch):
    config = tiny.config(*ALL_AXES, f"run.output_dir={tmp_path}/runs")
    built = surroundings.build(config)
    assert surroundings._disk(config, built).ok
    usage = surroundings.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(surroundings.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    found = surroundings._disk(config, built)
    assert not found.ok and "the disk is full before" in found.detail
    assert not list(tmp_path.iterdir())


def test_one_failure_is_a_failure():
    checks = [Check("devices", True, "8"), Check("context 2 against context 1", False, "loss differs")]
    assert doctor.to_json(checks) == {
        "ok": False,
        "checks": [
            {"name": "devices", "ok": True, "detail": "8"},
            {"name": "context 2 against context 1", "ok": False, "detail": "loss differs"},
        ],
    }
    with pytest.raises(CheckFailed, match="1 of 2 checks failed: context 2 against context 1"):
        doctor.verdict(checks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_axes_agree(dtype):
    found = list(agreement.checks(tiny.config(*ALL_AXES, f"model.compute_dtype={dtype}")))
    assert [check.name.split(" against ")[0] for check in found] == [
        "collective backend",
        "data 1 x fsdp 2 x context 2 x tensor 2",
        "context 2",
        "fsdp 2",
        "tensor 2",
        "accumulation 2",
    ]
    assert all(check.ok for check in found), found


@pytest.mark.slow
def test_a_broken_ring_is_caught_and_placed():
    """The last gradients of K and V are not brought home: the loss is right, and the gradients of k and v are not."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "the last shift of the gradient is missing")
    with broken(mutant):
        found = {check.name: check for check in agreement.checks(tiny.config(*ALL_AXES))}
    assert not found["context 2 against context 1"].ok
    assert "the fault is in attention across the context axis" in found["context 2 against context 1"].detail
    assert not found["data 1 x fsdp 2 x context 2 x tensor 2 against data 8 and the plain kernel"].ok
    assert found["fsdp 2 against fsdp 1"].ok and found["tensor 2 against tensor 1"].ok


@pytest.mark.slow
def test_the_command(workspace: Workspace):
    said = workspace.run("doctor", "config.yaml", "--json", "found.json")
    found = json.loads((workspace.folder / "found.json").read_text())
    assert found["ok"] and all(check["ok"] for check in found["checks"])
    assert f"all {len(found['checks'])} checks hold" in said
    assert not (workspace.folder / "runs").exists()
