"""The wheel works outside the checkout: the package data is in it, and the command starts."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

import tiny
from longtrain.config import reading

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and this environment's libraries behind it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(
        CHECKOUT / "longtrain", source / "longtrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, source)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, *pip, "wheel", "--no-deps", "-w", folder, source], check=True)
    (wheel,) = folder.glob("longtrain-*.whl")

    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, *pip, "install", "--no-deps", wheel], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # A line in a .pth file adds a folder behind the environment's own, without that folder's .pth files: an
    # editable install of the checkout there is not seen.
    (Path(site) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_wheel_carries_the_presets(installed: Path, tmp_path: Path):
    place = run(installed, tmp_path, "-c", "import longtrain; print(longtrain.__file__)")
    assert Path(place.strip()).is_relative_to(installed.parent.parent)
    names = run(
        installed,
        tmp_path,
        "-c",
        "from longtrain.config import reading; print(*reading.preset_names(), sep='\\n')",
    )
    assert names.split() == reading.preset_names()


@pytest.mark.slow
def test_the_installed_command_resolves_a_preset(installed: Path, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny.TREE))
    for command in (["-m", "longtrain"], [str(installed.parent / "longtrain")]):
        shown = run(installed, tmp_path, *command, "config", "run.yaml", "run.steps=7")
        resolved = yaml.safe_load(shown)
        assert (resolved["model"]["embed_dim"], resolved["run"]["steps"]) == (64, 7)
        assert "matmul_efficiency" in run(installed, tmp_path, *command, "plan", "run.yaml", "--hardware", "H100")
