"""What the command line answers by itself: help, usage and configs. A jax that cannot be imported stands in the way."""

import json

import pytest
import yaml

from longtrain import hardware
from runs import CHECKOUT, TREE, Workspace, finish

COMMANDS = ("train", "plan", "eval", "generate", "data prepare", "data inspect", "config")


@pytest.fixture(scope="module")
def no_jax(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing jax ends the process with exit code 99."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "jax.py").write_text("import os\nos._exit(99)\n")
    return {"PYTHONPATH": f"{folder}:{CHECKOUT}"}


def test_jax_would_be_noticed(workspace: Workspace, no_jax: dict[str, str]):
    workspace.run("train", "config.yaml", environment=no_jax, code=99)


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("run.stesp=3", "run.stesp", "run.steps"),
        ("optimiser.learning_rate=1", "optimiser", "optimizer"),
        ("oops", "override", "dotted.key=value"),
        ("run.steps=0", "run.steps", ">= 1"),
        ("run.steps=many", "run.steps", "a whole number"),
        ("optimizer.learning_rate=-1e-4", "optimizer.learning_rate", "> 0"),
        ("attention.strategy=rings", "attention.strategy", "ring, all_gather, ulysses"),
        ("model.preset=lama", "model.preset", "llama3_8b"),
        ("model.num_kv_heads=3", "model.num_kv_heads", "1, 2, 4"),
        ("mesh.context=3", "sequence_length", "multiple"),
        ("batch.accumulation=3", "batch.sequences", "multiple"),
        ("mesh.simulate_devices=8", "mesh.simulate_devices", "2, or auto"),
        ("mesh.tensor=8", "mesh.tensor", "1, 2, 4"),
        ("data.sources=[]", "data.sources", "empty"),
        ("communication.backend=nccl", "communication.backend", "auto"),
        ("communication.xla_flags=[oops]", "communication.xla_flags", "--"),
    ],
)
def test_a_bad_config(workspace: Workspace, no_jax: dict[str, str], override: str, key: str, says: str):
    text = workspace.run("train", "config.yaml", override, environment=no_jax, code=2)
    first, *problems = text.splitlines()
    assert first.startswith("longtrain: ") and "is refused (" in first
    (problem,) = [line for line in problems if line.startswith(f"  {key}")]
    assert says in problem
    assert not workspace.run_dir("run").exists()


def test_every_problem_at_once(workspace: Workspace, no_jax: dict[str, str]):
    bad = ("run.steps=0", "batch.accumulation=3", "run.nmae=x")
    text = workspace.run("train", "config.yaml", *bad, environment=no_jax, code=2)
    assert "(3 problems)" in text


def test_ulysses_wants_key_value_heads_for_every_shard(workspace: Workspace, no_jax: dict[str, str]):
    too_many = ("attention.strategy=ulysses", "mesh.context=4")  # of 2 key/value heads
    text = workspace.run("train", "config.yaml", *too_many, environment=no_jax, code=2)
    assert "mesh.context = 4" in text and "legal: 1, 2, or attention.strategy ring" in text


def test_a_config_that_is_no_yaml_or_not_there(workspace: Workspace, no_jax: dict[str, str]):
    (workspace.folder / "torn.yaml").write_text("run: {steps: 3\n")
    for name in ("torn.yaml", "nowhere.yaml"):
        assert name in workspace.run("train", name, environment=no_jax, code=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(workspace: Workspace, no_jax: dict[str, str], command: str):
    text = workspace.run(*command.split(), "--help", environment=no_jax)
    assert "CONFIG" in text and "KEY=VALUE" in text
    options = {
        "plan": ("--hardware", "--devices", "--document-tokens", "--assumptions", "--json"),
        "eval": ("--step", "--json"),
        "generate": ("--step", "--prompt", "--tokens", "--temperature", "--top-p", "--seed"),
        "data inspect": ("--step", "--json"),
        "config": ("--origins", "--schema"),
    }
    for option in options.get(command, ()):
        line = next(line for line in text.splitlines() if line.strip().startswith(option))
        assert line  # named in the list of options, not in the usage alone
    top = workspace.run("--help", environment=no_jax)
    assert command.split()[0] in top
    assert all(f"{code} " in top for code in (0, 1, 2, 3, 4, 5, 6, 75))


def test_a_plan(workspace: Workspace, no_jax: dict[str, str]):
    plan = ("plan", "config.yaml", "--hardware", "H100", "--json", "plan.json")
    text = workspace.run(*plan, "--search", "--max-sequence", environment=no_jax)
    assert "The fastest of" in text and "Longest row that fits" in text
    assert "Fits: " in text and "to spare" in text and "matmul_efficiency" in text
    found = json.loads((workspace.folder / "plan.json").read_text())
    kinds = {"parameters", "optimizer", "gradients", "activations"}
    assert found["fits"] is True and found["compiled"] is None
    assert found["memory_bytes"].keys() == kinds | {"total"}
    assert found["memory_bytes"]["total"] == sum(found["memory_bytes"][kind] for kind in kinds)
    assert found["device_memory_bytes"] == hardware.DEVICES["H100"].memory_bytes
    numbers = ("parameters", "flops_per_step", "step_seconds", "tokens_per_second_per_device", "mfu_causal")
    assert all(found[number] > 0 for number in numbers)


def test_a_plan_that_does_not_fit(workspace: Workspace, no_jax: dict[str, str]):
    """Exit code 1, after all of it is printed and written."""
    large = ("model.preset=llama3_70b", "model.num_layers=80")
    text = workspace.run("plan", "config.yaml", *large, "--hardware=H100", "--json=p.json", environment=no_jax, code=1)
    assert "longtrain: does not fit" in text and "What needs less memory" in text and "matmul_efficiency" in text
    found = json.loads((workspace.folder / "p.json").read_text())
    assert found["fits"] is False and found["memory_bytes"]["total"] > found["device_memory_bytes"]


def test_a_plan_needs_hardware(workspace: Workspace, no_jax: dict[str, str]):
    for kind, nearest in (
        ((), ""),
        (("--hardware", "H1000"), "the nearest: H100;"),
        (("--hardware", "a100"), "the nearest: A100-40GB or A100-80GB;"),
    ):
        text = workspace.run("plan", "config.yaml", *kind, environment=no_jax, code=2)
        assert "--hardware = " in text and nearest in text and "GB200" in text
    text = " ".join(workspace.run("plan", "--help", environment=no_jax).split())
    assert f"required: the kind of device, {', '.join(hardware.DEVICES)}" in text


def test_a_plan_says_what_fills_its_rows(workspace: Workspace, no_jax: dict[str, str]):
    for options, says in (
        ((), "as if each were one document (--document-tokens N for packed ones)"),
        (("data.packing=one",), "one document each"),
        (("--document-tokens=16",), "of documents of 16"),
        (("--document-tokens=1000",), "--document-tokens 1,000 is more than a row: planned with 64"),
    ):
        text = workspace.run("plan", "config.yaml", "--hardware=H100", *options, environment=no_jax)
        assert says in " ".join(text.split())


@pytest.mark.parametrize("option", ["--json", "--timeline"])
def test_what_cannot_be_written_is_refused_before_any_work(
    workspace: Workspace, no_jax: dict[str, str], option: str
):
    (workspace.folder / "kept").write_text("kept")
    for path in ("/proc/x.json", "no/such/x.json", "corpus", "x" * 300):
        text = workspace.run("plan", "config.yaml", option, path, environment=no_jax, code=2)
        assert f"argument {option}: {path}" in text and "Traceback" not in text
    # Trying neither changes a file nor leaves one.
    for path in ("kept", "new"):
        workspace.run("plan", "config.yaml", option, path, environment=no_jax, code=2)
    assert (workspace.folder / "kept").read_text() == "kept" and not (workspace.folder / "new").exists()


def test_a_result_that_finds_no_room(workspace: Workspace, no_jax: dict[str, str]):
    text = workspace.run("plan", "config.yaml", "--hardware=H100", "--json=/dev/full", environment=no_jax, code=2)
    assert "--json = '/dev/full': cannot be written: No space left" in text


def test_the_cpus_compiler_draws_no_timeline(workspace: Workspace, no_jax: dict[str, str]):
    options = ("--compile", "--compiler=cpu", "--timeline=x.svg")
    text = workspace.run("plan", "config.yaml", "--hardware=H100", *options, environment=no_jax, code=2)
    assert "--timeline x.svg = 'with --compiler cpu': has nothing to draw" in text


def test_overrides_stand_anywhere(workspace: Workspace, no_jax: dict[str, str]):
    shown = workspace.run("config", "config.yaml", "run.steps=7", "--origins", "mesh.context=1", environment=no_jax)
    tree = yaml.safe_load(shown)
    assert (tree["run"]["steps"], tree["mesh"]["context"]) == (7, 1)
    assert tree["optimizer"]["learning_rate"] == TREE["optimizer"]["learning_rate"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("trian", "config.yaml"),
        ("train",),
        ("train", "config.yaml", "--json", "x"),
        ("eval", "config.yaml", "--step", "0"),
        ("eval", "config.yaml", "--json", "no/such/folder/x.json"),
        ("plan", "config.yaml", "--devices", "0"),
        ("plan", "config.yaml", "--devices", "x"),
        ("generate", "config.yaml"),
        ("generate", "config.yaml", "--prompt", "x", "--top-p", "0"),
        ("config",),
    ],
    ids=" ".join,
)
def test_usage(workspace: Workspace, no_jax: dict[str, str], arguments: tuple[str, ...]):
    text = workspace.run(*arguments, environment=no_jax, code=2)
    assert "usage:" in text and "Traceback" not in text and "_" not in text.splitlines()[-1]


def test_a_reader_that_goes_away(workspace: Workspace, no_jax: dict[str, str]):
    process = workspace.start("config", "config.yaml", environment=no_jax)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == ""


def test_the_data_commands(workspace: Workspace, no_jax: dict[str, str]):
    assert "12 documents" in workspace.run("data", "prepare", "config.yaml", environment=no_jax)
    assert "reusing" in workspace.run("data", "prepare", "config.yaml", environment=no_jax)
    nothing = workspace.start("data", "prepare", "config.yaml", "data.sources.0.path=nowhere", environment=no_jax)
    assert "nowhere" in finish(nothing, 3)
