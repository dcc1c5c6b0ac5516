"""What a config is compiled for where no device is, and the process that does it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longtrain import hardware
from longtrain.config import to_yaml
from longtrain.errors import ConfigError
from longtrain.plan import targets
from tiny import config


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch):
    """As where both plug-ins are installed: a target is only words until its devices are asked for."""
    monkeypatch.setattr(targets, "_version", lambda package: "0.12.0")
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("kind", "devices", "topology"),
    [
        ("H100", 1, "1x1x1"),
        ("H100", 4, "1x1x4"),
        ("H100", 16, "1x2x8"),
        ("h200", 12, "1x3x4"),
        ("GB200", 32, "1x8x4"),
        ("NVIDIA B200", 24, "1x3x8"),
    ],
)
def test_gpus_are_whole_hosts(plugins, kind: str, devices: int, topology: str):
    target = targets.target(kind, devices)
    assert (target.platform, target.options["topology"]) == ("cuda", topology)


@pytest.mark.parametrize(
    ("kind", "devices", "topology", "accelerator"),
    [
        ("v5p", 1, "v5p:1x1x1", "v5p-2"),
        ("v5p", 2, "v5p:2x1x1", "v5p-4"),
        ("v5p", 4, "v5p:2x2x1", "v5p-8"),
        ("v5p", 32, "v5p:2x4x4", "v5p-64"),
        ("v5p", 128, "v5p:4x4x8", "v5p-256"),
        ("v6e", 2, "v6e:1x2", "v6e-2"),
        ("v6e", 32, "v6e:4x8", "v6e-32"),
        ("v5e", 256, "v5e:16x16", "v5litepod-256"),
    ],
)
def test_tpus_are_slices(plugins, kind: str, devices: int, topology: str, accelerator: str):
    target = targets.target(kind, devices)
    assert (target.topology, target.environment["TPU_ACCELERATOR_TYPE"]) == (topology, accelerator)


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=lambda device: device.name)
def test_every_kind_of_the_table_can_be_compiled_for(plugins, device: hardware.Device):
    assert targets.target(device.name, 8).memory_bytes == device.memory_bytes


def refusal(kind: str, devices: int) -> str:
    with pytest.raises(ConfigError) as error:
        targets.target(kind, devices)
    return str(error.value)


def test_what_cannot_be_compiled_for_is_refused(plugins):
    assert "legal: A100-40GB, A100-80GB, H100" in refusal("H1000", 8)
    assert "24 chips are no slice of it: a power of two, at most 4096" in refusal("v5p", 24)
    assert "512 chips" in refusal("v6e", 512)


def test_a_missing_plugin_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "_version", lambda package: None)
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for kind, plugin in (("GB200", "jax-cuda13-plugin"), ("v5p", "libtpu")):
        message = refusal(kind, 8)
        assert plugin in message and "pip install 'longtrain[plan]'" in message and "--compiler cpu" in message


def test_a_plugin_of_another_jaxlib_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "_version", lambda package: "0.12.0" if "cuda13" in package else "0.10.2")
    assert "jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2" in refusal("H100", 8)


SMALL = ("model.compute_dtype=bfloat16", "model.num_layers=1", "memory.remat=none")


def compiled(tmp_path: Path, hardware: str, *overrides: str) -> tuple[dict, str]:
    """What the worker says of the small config, and its program."""
    path, program = tmp_path / "config.yaml", tmp_path / "program.hlo"
    path.write_text(to_yaml(config(*SMALL, *overrides)), encoding="utf-8")
    arguments = [str(path), "--hardware", hardware, "--program", str(program)]
    done = subprocess.run([sys.executable, "-m", "longtrain.plan.worker", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), program.read_text(encoding="utf-8")


def check(said: dict, program: str, device_kind: str) -> None:
    assert said["device_kind"] == device_kind
    memory = said["memory"]
    assert memory["needed"] == memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] > 0
    assert memory["alias"] > 0, "the state is donated"
    assert "is_scheduled=true" in program


def test_the_worker_compiles_the_train_step(tmp_path: Path):
    said, program = compiled(tmp_path, "cpu", "mesh.fsdp=2")
    check(said, program, "cpu")
    assert said["mesh"] == {"data": 1, "fsdp": 2, "context": 1, "tensor": 1}
    assert "all-gather" in program


def has_gpu_plugin() -> bool:
    return any(targets._version(name) for name in targets._GPU_PLUGINS)


needs_gpu_plugin = pytest.mark.skipif(not has_gpu_plugin(), reason="needs the extra `plan` (jax-cuda13-plugin)")
needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra `plan` (libtpu)")


@pytest.mark.slow
@pytest.mark.ahead_of_time
@needs_gpu_plugin
def test_the_worker_compiles_for_gpus(tmp_path: Path):
    said, program = compiled(tmp_path, "GB200", "mesh.fsdp=2")
    check(said, program, "NVIDIA GB200")


@pytest.mark.slow
@pytest.mark.ahead_of_time
@needs_gpu_plugin
def test_the_plugin_takes_every_gpu_as_it_is_described():
    code = """
from longtrain import hardware
from longtrain.plan import targets
import jax
for kind in targets._GPUS:
    devices = targets.target(kind, 16).abstract_devices()
    assert len(devices) == 16 and hardware.lookup(devices[0].device_kind) == hardware.DEVICES[kind], devices
    on = jax.sharding.SingleDeviceSharding(devices[0])
    square = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=on)
    assert "fusion" in jax.jit(lambda x: x @ x).lower(square).compile().as_text()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.slow
@pytest.mark.ahead_of_time
@needs_libtpu
def test_the_worker_compiles_for_tpus(tmp_path: Path):
    said, program = compiled(tmp_path, "v5p", "mesh.fsdp=2")
    check(said, program, "TPU v5")


@pytest.mark.slow
@pytest.mark.ahead_of_time
@needs_libtpu
def test_a_mesh_axis_may_take_a_part_of_the_torus():
    """16 x 2 on 4 x 8 chips; the pairs of tensor are neighbours."""
    code = """
import os
from longtrain.plan import targets
target = targets.target("v6e", 32)
os.environ.update(target.environment)
from longtrain.parallel.mesh import make_mesh
mesh = make_mesh({"data": 1, "fsdp": 1, "context": 16, "tensor": 2}, target.abstract_devices())
for first, second in mesh.devices.reshape(16, 2):
    assert sum(abs(a - b) for a, b in zip(first.coords, second.coords)) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
