"""Compiles a config in a process of its own (`worker.py`), and keeps what came of it.

The same config, code and versions give the same program, so it is compiled once: a compilation of an 8B model takes
minutes. What is kept lies in the user's cache folder, `$XDG_CACHE_HOME/longtrain/plan` (default: ~/.cache); it may be
deleted at any time.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import longtrain
from longtrain.config import Config, to_yaml
from longtrain.errors import CheckFailed, ConfigError, LongtrainError, Problem
from longtrain.plan.targets import Target
from longtrain.plan.worker import Compiled

# Whose versions decide what is compiled; the plug-ins where they are installed.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")

# Sections that say nothing of the program.
_NOT_OF_THE_PROGRAM = {"checkpoint", "metrics", "cluster"}


class Refused(LongtrainError):
    """The config cannot be compiled as it stands, in the worker's own words."""

    exit_code = ConfigError.exit_code


def compiled(
    config: Config, target: Target, *, say: Callable[[str], None] = lambda message: None
) -> tuple[Compiled, str | None]:
    """What the compiler says of the config's train step, and the program's HLO text (None where it does not fit).

    Raises:
      ConfigError, Refused: where the config cannot be compiled for the target.
      CheckFailed: where the compiler itself failed, with its last words.
    """
    folder = cache_folder() / _key(config, target)
    said, text = folder / "compiled.json", folder / "program.hlo.gz"
    if not said.exists():
        say(f"compiling for {target.devices} x {target.kind}, some minutes for a large model; kept in {folder}")
        _compile(config, target, folder)
    program = gzip.decompress(text.read_bytes()).decode() if text.exists() else None
    return Compiled.from_json(said.read_text(encoding="utf-8")), program


def cache_folder() -> Path:
    """Where compilations are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "longtrain" / "plan"


def _compile(config: Config, target: Target, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        work = Path(scratch)
        (work / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        arguments = [str(work / "config.yaml"), "--hardware", target.kind, "--devices", str(target.devices)]
        command = [sys.executable, "-m", "longtrain.plan.worker", *arguments, "--program", str(work / "program.hlo")]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise _failure(config, target, done)
        result = work / "result"
        result.mkdir()
        (result / "compiled.json").write_text(done.stdout.splitlines()[-1], encoding="utf-8")
        if (work / "program.hlo").exists():
            (result / "program.hlo.gz").write_bytes(gzip.compress((work / "program.hlo").read_bytes()))
        try:
            result.rename(folder)
        except OSError:
            if not (folder / "compiled.json").exists():  # else another process was faster with the same
                raise


def _environment() -> dict[str, str]:
    """The child's: this package on its path wherever it was imported from, none of this process's flags."""
    paths = [str(Path(longtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {name: value for name, value in environment.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


def _failure(config: Config, target: Target, done: subprocess.CompletedProcess[str]) -> Exception:
    """The exception for a worker that failed."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    flags = config.communication.xla_flags
    unknown = [line for line in lines if "Unknown flag" in line]
    if flags and unknown:
        message = f"the compiler does not take these flags: {unknown[-1]}"
        return ConfigError([Problem("communication.xla_flags", list(flags), message)], "the plan")
    if done.returncode == ConfigError.exit_code:
        return Refused("\n".join(lines))
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    last = "\n".join(lines[-12:])
    return CheckFailed(f"compiling for {target.kind} failed ({ended}). The compiler's last words:\n{last}")


def _key(config: Config, target: Target) -> str:
    """Names everything that the program depends on."""
    parts = [
        json.dumps(config.model_dump(mode="json", exclude=_NOT_OF_THE_PROGRAM), sort_keys=True),
        f"{target.kind} {target.devices} {target.topology} {sorted(target.options.items())} {target.flags}",
        *(f"{package} {_version(package)}" for package in _PACKAGES),
        sys.version,
        *_code(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _code() -> Iterable[str]:
    """A digest of each source file of the package."""
    root = Path(longtrain.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
