"""`plan --compile`: the process that compiles, what is kept of it, and what the command makes of what it says."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtrain import cli
from longtrain.config import to_yaml
from longtrain.errors import CheckFailed, ConfigError
from longtrain.plan import compiling, lint, targets
from longtrain.plan.targets import Target, target
from longtrain.plan.worker import Compiled, Memory
from tiny import config

GIB = 2**30
PROGRAMS = Path(__file__).parent / "programs"
ON_EIGHT = ("mesh.fsdp=2", "mesh.context=4", "sequence_length=16384", "model.compute_dtype=bfloat16")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_version", lambda package: "0.12.0")


Worker = Callable[..., list[list[str]]]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """In place of the compiling process: what it is to answer. Gives the list of its calls."""

    def answers(
        program: str | None = "ring.GB200.0.12.0.1", needed: int = GIB, out_of_memory: str | None = None
    ) -> list[list[str]]:
        memory = None if out_of_memory else Memory(argument=needed, output=0, alias=0, temp=0, host=0)
        said = Compiled("NVIDIA GB200", 8, {}, ("attention.kernel: xla",), "0.12.0", 1.0, memory, out_of_memory)
        calls: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if program:
                Path(command[-1]).write_bytes((PROGRAMS / f"{program}.hlo").read_bytes())
            return subprocess.CompletedProcess(command, 0, stdout=f"noise\n{said.to_json()}\n", stderr="")

        monkeypatch.setattr(compiling.subprocess, "run", run)
        return calls

    return answers


def failing(monkeypatch: pytest.MonkeyPatch, returncode: int, stderr: str) -> None:
    done = subprocess.CompletedProcess([], returncode, stdout="", stderr=stderr)
    monkeypatch.setattr(compiling.subprocess, "run", lambda command, **_: done)


def gpu() -> Target:
    return target("GB200", 8)


def test_the_same_is_compiled_once(worker: Worker):
    calls = worker()
    whole = config(*ON_EIGHT)
    first, again = (compiling.compiled(whole, gpu()) for _ in range(2))
    assert first == again and first[1] is not None and "collective-permute" in first[1]
    assert len(calls) == 1
    assert calls[0][:3] == [sys.executable, "-m", "longtrain.plan.worker"]
    assert compiling.cache_folder() == Path(compiling.os.environ["XDG_CACHE_HOME"]) / "longtrain" / "plan"


def test_another_config_target_version_or_code_is_compiled_anew(worker: Worker, monkeypatch: pytest.MonkeyPatch):
    calls = worker()
    whole = config(*ON_EIGHT)
    compiling.compiled(whole, gpu())
    compiling.compiled(config(*ON_EIGHT, "memory.loss_chunk=32"), gpu())
    assert len(calls) == 2
    compiling.compiled(whole, target("H100", 8))
    assert len(calls) == 3
    monkeypatch.setattr(compiling, "_version", lambda package: "0.13.0")
    compiling.compiled(whole, gpu())
    assert len(calls) == 4
    monkeypatch.setattr(compiling, "_code", lambda: ["changed"])
    compiling.compiled(whole, gpu())
    assert len(calls) == 5
    compiling.compiled(config(*ON_EIGHT, "metrics.log_every=7"), gpu())  # nothing of the program
    assert len(calls) == 5


def test_what_failed_is_not_kept(worker: Worker, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, -6, "E1: something\nF2: Check failed: schedule.size() == 23")
    with pytest.raises(CheckFailed, match=r"compiling for GB200 failed \(SIGABRT\)(.|\n)*Check failed: schedule"):
        compiling.compiled(config(*ON_EIGHT), gpu())
    calls = worker()
    compiling.compiled(config(*ON_EIGHT), gpu())
    assert len(calls) == 1


def test_an_unknown_flag_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, -6, "F parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_gpu_nothing=1")
    whole = config(*ON_EIGHT, "communication.xla_flags=[--xla_gpu_nothing=1]")
    with pytest.raises(ConfigError, match=r"communication.xla_flags = .*Unknown flag in XLA_FLAGS: --xla_gpu_nothing"):
        compiling.compiled(whole, gpu())


def test_a_config_that_the_worker_refuses_keeps_its_words_and_exit_code(monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, 2, "config is refused (1 problem):\n  communication.backend = 'nvshmem': no")
    with pytest.raises(compiling.Refused, match="communication.backend = 'nvshmem'") as error:
        compiling.compiled(config(*ON_EIGHT), gpu())
    assert error.value.exit_code == 2


def test_this_processs_flags_do_not_reach_the_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert "XLA_FLAGS" not in compiling._environment()
    assert str(Path(compiling.longtrain.__file__).parents[1]) in compiling._environment()["PYTHONPATH"]


def plan(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    """Exit code and JSON of the command."""
    path, out = tmp_path / "config.yaml", tmp_path / "plan.json"
    path.write_text(to_yaml(config(*ON_EIGHT)), encoding="utf-8")
    code = cli.main(["plan", str(path), "--hardware", "GB200", "--json", str(out), "--compile", *arguments])
    return code, json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def test_the_command_says_what_was_compiled(worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    worker(needed=3 * GIB)
    code, said = plan(tmp_path)
    assert (code, said["fits"]) == (0, True)
    compiled = said["compiled"]
    assert compiled["memory_bytes"] == 3 * GIB
    assert compiled["flops_per_device"] == 4 * 2 * 2 * 4096**2 * 512
    (permute,) = compiled["collectives"]
    assert permute | {"seconds": 0, "exposed_seconds": 0} == {
        "kind": "collective-permute",
        "axes": ["context"],
        "count": 3,
        "bytes": 3 * 4096 * 512 * 2,
        "backend": "nccl",
        "asynchronous": True,
        "seconds": 0,
        "exposed_seconds": 0,
        "beside": "dot_general",
    }
    # 720 GB/s of NVLink and 20 microseconds, by the table of assumptions.
    assert permute["seconds"] == pytest.approx(3 * (20e-6 + 4096 * 512 * 2 / 720e9))
    assert 0 <= permute["exposed_seconds"] <= permute["seconds"]
    assert compiled["largest_buffers"][0]["array"].startswith("bf16[4096,")
    printed = capsys.readouterr().out
    assert "The compiled step fits: 3.0 GiB" in printed and "collective-permute" in printed


def test_the_step_is_drawn(worker: Worker, tmp_path: Path):
    worker()
    assert plan(tmp_path, "--timeline", str(tmp_path / "step.svg"))[0] == 0
    picture = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "tiny, rows of 16,384 tokens, 8 x GB200, fsdp 2 x context 4" in picture and "collective-permute" in picture


def test_what_the_compiler_needs_decides_whether_it_fits(worker: Worker, tmp_path: Path, capsys):
    worker(needed=500 * GIB)
    code, said = plan(tmp_path)
    assert (code, said["fits"], said["compiled"]["fits"]) == (1, False, False)
    assert "the compiled step does not fit: 500.0 GiB" in capsys.readouterr().err
    assert "memory" in [finding["rule"] for finding in said["compiled"]["lint"]]


def test_a_compiler_that_gives_up_for_want_of_memory(worker: Worker, tmp_path: Path, capsys):
    worker(program=None, out_of_memory="RESOURCE_EXHAUSTED: 612.06G exceeds available HBM (95.73G)\nmore")
    code, said = plan(tmp_path)
    assert (code, said["fits"], said["compiled"]["memory_bytes"]) == (1, False, None)
    assert "612.06G exceeds available HBM" in capsys.readouterr().err


def test_strict_fails_on_what_the_lint_finds(worker: Worker, tmp_path: Path, capsys):
    worker(program="sabotaged_ring.GB200.0.12.0.1")
    assert plan(tmp_path)[0] == 0
    code, said = plan(tmp_path, "--strict")
    rules = {finding["rule"] for finding in said["compiled"]["lint"]}
    assert code == 1 and "square-buffer" in rules
    assert f"--strict: the lint found {len(said['compiled']['lint'])}" in capsys.readouterr().err


def test_the_cpus_compiler_is_marked_and_says_nothing_of_collectives(worker: Worker, tmp_path: Path, capsys):
    calls = worker()
    code, said = plan(tmp_path, "--compiler", "cpu")
    assert code == 0 and calls[0][calls[0].index("--hardware") + 1] == "cpu"
    assert said["compiled"]["compiler"] == "cpu" and said["compiled"]["collectives"] == []
    assert said["compiled"]["lint"] == []
    assert "An estimate by the CPU's compiler" in capsys.readouterr().out


def test_without_the_plugin_nothing_is_compiled(worker: Worker, tmp_path: Path, monkeypatch, capsys):
    calls = worker()
    monkeypatch.setattr(targets, "_version", lambda package: None)
    code, said = plan(tmp_path)
    assert (code, said, calls) == (2, {}, [])
    message = capsys.readouterr().err
    assert "pip install 'longtrain[plan]'" in message and "--compiler cpu" in message


def test_the_documentation_names_every_rule():
    page = (PROGRAMS.parents[1] / "docs" / "compiled_plan.md").read_text(encoding="utf-8")
    assert [rule for rule in lint.RULES if f"| `{rule}` |" not in page] == []


@pytest.mark.slow
@pytest.mark.ahead_of_time
def test_a_shipped_config_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole way, with the real compiler: 64K tokens on 16 GB200."""
    monkeypatch.undo()
    try:
        gpu()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, out = PROGRAMS.parents[1] / "configs" / "llama3_8b_64k.yaml", tmp_path / "plan.json"
    options = ["--hardware", "GB200", "--compile", "--strict", "--json", str(out)]
    assert cli.main(["plan", str(path), *options]) == 0
    said = json.loads(out.read_text(encoding="utf-8"))
    compiled = said["compiled"]
    assert compiled["lint"] == []
    assert compiled["memory_bytes"] == pytest.approx(said["memory_bytes"]["total"], rel=0.15)  # law 6
    # A ring of 4: forward 3 shifts, backward 3 of keys and values and 4 of their gradients; 32 layers, 8 micro-batches.
    (permutes,) = [one for one in compiled["collectives"] if one["kind"] == "collective-permute"]
    assert permutes["axes"] == ["context"] and permutes["count"] == 10 * 32 * 8
    assert permutes["exposed_seconds"] < 0.1 * permutes["seconds"]
    # 6 N T of the linear products, what remat computes again, and attention's seven products.
    assert 1 < compiled["flops_per_device"] * said["devices"] / said["flops_per_step"] < 1.3


@pytest.mark.parametrize("options", [["--strict"], ["--compiler", "cpu"], ["--timeline", "step.svg"]])
def test_options_of_compiling_alone_are_refused_without_it(options: list[str], capsys):
    assert cli.main(["plan", "config.yaml", "--hardware", "GB200", *options]) == 2
    assert f"{' '.join(options)} = 'without --compile'" in capsys.readouterr().err
