"""What a run leaves behind and says: the contract's files, numbers, and what the same command does next."""

import json
import math
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

import runs
from documents import batch_hash
from longtrain.config import load
from longtrain.data.prepare import ensure
from longtrain.data.rows import RowIndex
from runs import Workspace

EVALUATING = ("eval.every_steps=2",)
FLOATS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "padding_fraction",
    "attention_work_balance",
    "step_seconds",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu_causal",
    "data_wait_seconds",
    "checkpoint_stall_seconds",
}
COUNTS = {"step", "valid_tokens", "tokens_seen", "documents", "compilations"}
EVAL_KEYS = {"eval_loss", "eval_perplexity", "eval_tokens", "eval_documents"}


@pytest.fixture(scope="module")
def resumed(workspace: Workspace) -> list[str]:
    """What was said by the processes of the run `resumed`: to step 3, to step 6, and once more."""
    return [workspace.train("resumed", *EVALUATING, f"run.steps={steps}") for steps in (3, 6, 6)]


def test_metrics_have_the_contract_keys(workspace: Workspace, resumed: list[str]):
    lines = workspace.lines("resumed")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        # The last step of a process that was to end there is evaluated too.
        evaluated = EVAL_KEYS if line["step"] in (2, 3, 4, 6) else set()
        assert line.keys() == FLOATS | COUNTS | {"batch_hash"} | evaluated
        assert all(type(line[name]) is int for name in COUNTS | evaluated & {"eval_tokens", "eval_documents"})
        assert all(type(line[name]) is float for name in FLOATS | evaluated & {"eval_loss", "eval_perplexity"})
        assert re.fullmatch("[0-9a-f]{16}", line["batch_hash"])
        assert 0 <= line["padding_fraction"] < 1 <= line["attention_work_balance"]
        assert line["tokens_per_second"] == pytest.approx(line["valid_tokens"] / line["step_seconds"])
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / 2)
        assert line["compilations"] == 1
        if evaluated:
            assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    seen = 0
    for line in lines:
        seen += line["valid_tokens"]
        assert line["tokens_seen"] == seen
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def test_the_files_of_a_run(workspace: Workspace, resumed: list[str]):
    files = {path.name for path in workspace.run_dir("resumed").iterdir()}
    assert files == {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", ".lock"}
    assert workspace.checkpoints("resumed") == ["2", "3", "4", "6"]
    shown = workspace.run("config", "config.yaml", "run.name=resumed", *EVALUATING, "run.steps=6")
    assert (workspace.run_dir("resumed") / "config.yaml").read_text() == shown


def test_what_a_run_says(resumed: list[str]):
    first, second, third = resumed
    assert "on 2 x cpu, 1 process(es)" in first and "step 3/3" in first and "done: 3 steps" in first
    for command in ("tensorboard --logdir", "longtrain train", "longtrain eval", "longtrain generate"):
        assert f" {command} " in first
    assert "resuming after step 3, at row 12" in second
    assert "changed since that checkpoint: run.steps 3 -> 6" in second
    assert "run is complete, 6 of run.steps = 6" in third and "compiled" not in third


def events(folder: Path) -> Iterator[event_pb2.Event]:
    """The events of all files, in the order they were written."""
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        place = 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            yield event_pb2.Event.FromString(data[place + 12 : place + 12 + length])  # a CRC stands on either side
            place += 12 + length + 4


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value as TensorBoard shows them: a session's start drops what stands from its step on."""
    found: dict[tuple[str, int], float] = {}
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            found = {(tag, step): value for (tag, step), value in found.items() if step < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in found, "a step stands twice"
            found[value.tag, event.step] = value.simple_value
    return found


def as_scalars(lines: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    return {
        (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", line["step"]): pytest.approx(value)
        for line in lines
        for name, value in line.items()
        if name not in ("step", "batch_hash")
    }


def test_tensorboard_has_the_same_numbers(workspace: Workspace, resumed: list[str]):
    assert scalars(workspace.run_dir("resumed") / "tensorboard") == as_scalars(workspace.lines("resumed"))


def test_lines_beyond_the_checkpoint_and_torn_ones_are_written_again(workspace: Workspace):
    command = ("train", "config.yaml", "run.name=torn", "run.steps=200", "checkpoint.every_steps=5")
    process = workspace.start(*command)
    runs.wait_until(lambda: len(workspace.lines("torn")) >= 8, process)
    process.kill()
    runs.finish(process, -signal.SIGKILL)
    path = workspace.run_dir("torn") / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 10000, "loss": 1.0}\nneither JSON nor whole\n{"step": 3, "lo')
    last = int(max(workspace.checkpoints("torn"), key=lambda name: int(name.split(".")[0])).split(".")[0])
    workspace.run(*command, f"run.steps={last + 12}")
    lines = workspace.lines("torn")
    assert [line["step"] for line in lines] == list(range(1, last + 13))
    assert scalars(workspace.run_dir("torn") / "tensorboard") == as_scalars(lines)


def test_a_second_run_in_the_folder_of_a_living_one_is_refused(workspace: Workspace):
    first = workspace.start("train", "config.yaml", "run.name=shared", "run.steps=4000", "checkpoint.every_steps=4000")
    runs.wait_until(lambda: len(workspace.lines("shared")) >= 2, first)
    refused = workspace.train("shared", code=2)
    assert f"run.name = 'shared': process {first.pid} on " in refused and "another name" in refused
    first.kill()
    runs.finish(first, -signal.SIGKILL)
    workspace.train("shared", "run.steps=2")  # the dead hold no lock


def test_eval_of_a_run(workspace: Workspace, resumed: list[str]):
    for step in (3, 6):
        asked = () if step == 6 else ("--step", str(step))  # the newest is the default
        workspace.run("eval", "runs/resumed/config.yaml", *asked, "--json", "eval.json")
        line = json.loads((workspace.folder / "eval.json").read_text())
        logged = workspace.lines("resumed")[step - 1]
        assert line == {"step": step} | {name: logged[name] for name in EVAL_KEYS}
    no_such = workspace.run("eval", "config.yaml", "run.name=resumed", "--step", "5", code=5)
    assert "no complete checkpoint of step 5; there are: [2, 3, 4, 6]" in no_such
    assert "no-such-run" in workspace.run("eval", "config.yaml", "run.name=no-such-run", code=5)


def test_generate_from_a_run(workspace: Workspace, resumed: list[str]):
    command = ("generate", "runs/resumed/config.yaml", "--prompt", "alpha b", "--tokens", "8")

    def text(*more: object) -> str:
        process = workspace.start(*command, *more)
        out, err = process.communicate(timeout=runs.DEADLINE_SECONDS)
        assert process.returncode == 0, err
        return out

    greedy = text()
    assert len(greedy) > 1 and greedy.endswith("\n")
    assert text("mesh.context=4") == greedy
    sampled = text("--temperature", 5, "--seed", 1)
    assert sampled == text("--temperature", 5, "--seed", 1) != greedy
    assert "sequence_length" in workspace.run(*command, "--tokens", 64, code=2)


def test_weights_of_another_run(workspace: Workspace, resumed: list[str]):
    begun = workspace.train("begun", "checkpoint.init_from=runs/resumed", "run.steps=2")
    assert "weights of step 6 from" in begun
    line, _ = workspace.lines("begun")
    before = workspace.lines("resumed")
    for name in ("batch_hash", "valid_tokens", "tokens_seen", "learning_rate"):  # all but the weights is new
        assert line[name] == before[0][name]
    assert line["loss"] < before[3]["loss"]
    assert "weights of step 6" not in workspace.train("begun", "checkpoint.init_from=runs/resumed", "run.steps=2")
    other = ("checkpoint.init_from=runs/resumed", "model.mlp_dim=128", "model.embed_dim=32")
    refused = workspace.train("other", *other, code=2)
    assert "model.mlp_dim = 128: the checkpoint was made with 192" in refused
    assert "model.embed_dim = 32: the checkpoint was made with 64" in refused
    assert "nowhere" in workspace.train("other", "checkpoint.init_from=nowhere", code=5)


def test_weights_under_another_model(workspace: Workspace, resumed: list[str]):
    """A longer reach of rope is a fair experiment, in eval as in a new run, but not one to make unawares."""
    scaled = "model.rope.scaling={type: linear, factor: 2}"
    told = "changed since that checkpoint: model.rope.scaling None -> {'type': 'linear', 'factor': 2.0}\n"
    assert told in workspace.run("eval", "runs/resumed/config.yaml", scaled)
    as_trained = workspace.run("eval", "runs/resumed/config.yaml")
    assert "changed since" not in as_trained and "data plan" not in as_trained


@pytest.mark.slow
def test_a_tokenizer_is_the_checkpoints(workspace: Workspace):
    """One more file, and the tokenizer trained on the sources is another: its ids mean nothing to the weights."""
    shutil.copytree(workspace.folder / "corpus", workspace.folder / "growing")
    settings = (
        "data.sources.0.path=growing",
        "data.tokenizer={train: sentencepiece, vocab_size: 300}",
        "model.vocab_size=300",
        "eval.sequences=1",
        "run.steps=2",
    )
    workspace.train("taught", *settings)
    (workspace.folder / "growing" / "more.txt").write_text("epsilon zeta eta theta " * 40)
    command = ("config.yaml", "run.name=taught", *settings)
    for refused in (
        workspace.run("eval", *command, code=2),
        workspace.run("generate", *command, "--prompt", "alpha", code=2),
        workspace.train("pupil", *settings, "checkpoint.init_from=runs/taught", code=2),
    ):
        assert "data.tokenizer = {'train': 'sentencepiece'" in refused
        found = re.search(
            r"gives tokenizer (sentencepiece:\w{64}), the checkpoint was made with (sentencepiece:\w{64}); "
            r"legal: the same sources, where it was trained on them, or its file, (prepared/\w{16}/tokenizer.model)",
            refused,
        )
        assert found is not None and found[1] != found[2]
    assert "data plan is not that checkpoint's" in workspace.run("eval", *command, f"data.tokenizer={found[3]}")


@pytest.mark.slow
def test_a_profile(workspace: Workspace):
    workspace.train("profiled", "metrics.profile=[2,3]", "metrics.tensorboard=false", "run.steps=4")
    assert list((workspace.run_dir("profiled") / "profile").rglob("*.xplane.pb"))
    assert not (workspace.run_dir("profiled") / "tensorboard").exists()
    # What the trace was to show is behind a run that goes on from step 4.
    again = workspace.train("profiled", "metrics.profile=[2,3]", "metrics.tensorboard=false", "run.steps=5")
    assert "metrics.profile = [2, 3]: those steps are done" in again


@pytest.mark.slow
@pytest.mark.parametrize("on_change", ["restart", "continue"])
def test_another_order_of_the_data_where_it_is_asked_for(workspace: Workspace, on_change: str):
    name, change = f"on-{on_change}", ("data.packing=concat", f"data.on_change={on_change}")
    workspace.train(name, "run.steps=2")
    said = workspace.train(name, "run.steps=4", *change)
    first = 0 if on_change == "restart" else 8
    assert f"data.on_change = {on_change}: the data plan is not that checkpoint's" in said
    assert f"taken from row {first}" in said
    assert "data.on_change =" not in workspace.train(name, "run.steps=6", *change)  # the plan is the newest one's now
    here = (f"data.prepared_dir={workspace.folder}/prepared", f"data.sources.0.path={workspace.folder}/corpus")
    config = load(workspace.folder / "config.yaml", [*here, "data.packing=concat"])
    index = RowIndex.of(config, ensure(config, print), "train")
    found = [line["batch_hash"] for line in workspace.lines(name)[2:]]
    assert found == [batch_hash(index, first + 4 * step, 4) for step in range(4)]
    # Ids of another tokenizer are noise to the weights, whatever the order.
    vocabulary = json.dumps({"train": "sentencepiece", "vocab_size": 300})
    text = workspace.train(name, "run.steps=8", f"data.on_change={on_change}", f"data.tokenizer={vocabulary}", code=2)
    assert "data.tokenizer" in text and "the checkpoint was made with bytes" in text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_whole_group_finds_the_workers_deaf(workspace: Workspace, number: signal.Signals):
    """A scheduler and a keyboard signal the loader's processes too: they leave it to the parent, which saves."""
    name = f"group-{number.name}"
    overrides = (f"run.name={name}", "run.steps=500", "data.workers=2", "checkpoint.every_steps=1000")
    process = workspace.start("train", "config.yaml", *overrides, own_group=True)
    runs.wait_until(lambda: len(workspace.lines(name)) >= 3, process)
    os.killpg(process.pid, number)
    said = runs.finish(process, 75)
    stopped = workspace.lines(name)[-1]["step"]
    assert f"stopped by {number.name} after step {stopped}" in said
    assert workspace.checkpoints(name) == [str(stopped)]
    assert "Traceback" not in said
    deadline = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # and soon none is left of the group
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
