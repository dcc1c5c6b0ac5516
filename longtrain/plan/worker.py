"""Compiles a config's train step for hardware that is not there. Run as a process of its own:

    python -m longtrain.plan.worker CONFIG [KEY=VALUE …] --hardware KIND [--devices N] [--program FILE]

XLA reads its flags once and aborts on one it does not know, and libtpu its environment: neither may touch the process
that asks. Prints one line of JSON (`Compiled`); the optimized, scheduled program goes to FILE as HLO text.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from longtrain.config import Config, load
from longtrain.errors import ConfigError, LongtrainError, Problem
from longtrain.parallel import backend, process
from longtrain.plan import targets
from longtrain.plan.targets import Target


@dataclasses.dataclass(frozen=True)
class Memory:
    """A device's bytes by XLA's own account. What is donated is counted in argument, output and alias."""

    argument: int
    output: int
    alias: int
    temp: int
    host: int

    @property
    def needed(self) -> int:
        """What the step takes of the device's memory."""
        return self.argument + self.output - self.alias + self.temp


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compilation says beside the program. `memory` is None where the compiler itself found that the program
    does not fit (TPU), and `out_of_memory` is then its message."""

    device_kind: str
    devices: int
    mesh: dict[str, int]
    choices: tuple[str, ...]
    jaxlib: str
    compile_seconds: float
    memory: Memory | None
    out_of_memory: str | None

    def to_json(self) -> str:
        memory = self.memory and dataclasses.asdict(self.memory) | {"needed": self.memory.needed}
        return json.dumps(dataclasses.asdict(self) | {"memory": memory})

    @classmethod
    def from_json(cls, text: str) -> "Compiled":
        fields = json.loads(text)
        if memory := fields["memory"]:
            del memory["needed"]
        return cls(**fields | {"memory": memory and Memory(**memory), "choices": tuple(fields["choices"])})


def xla_flags(config: Config, target: Target) -> list[str]:
    """The target's flags and the config's own.

    Raises:
      ConfigError: where `communication.backend` is not one that the target has.
    """
    chosen = config.communication.backend
    backend.check_choice(chosen, target.platform, target.kind)
    flags = backend.flags(chosen, process.jaxlib_version(), simulated=False)
    return [*target.flags, *flags, *config.communication.xla_flags]


def compile_step(config: Config, target: Target, program: Path | None) -> Compiled:
    """Compiles the train step. The environment must have been set before jax was imported."""
    import jax

    from longtrain.build import build

    built = build(config, target.abstract_devices())
    started = time.perf_counter()
    memory = out_of_memory = None
    try:
        compiled = built.train_step()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        out_of_memory = str(error)
    else:
        stats = compiled.memory_analysis()
        assert stats is not None, "every platform here has it"
        memory = Memory(
            argument=stats.argument_size_in_bytes,
            output=stats.output_size_in_bytes,
            alias=stats.alias_size_in_bytes,
            temp=stats.temp_size_in_bytes,
            host=stats.host_argument_size_in_bytes
            + stats.host_output_size_in_bytes
            - stats.host_alias_size_in_bytes
            + stats.host_temp_size_in_bytes,
        )
        if program is not None:
            program.write_text(compiled.as_text() or "", encoding="utf-8")
    return Compiled(
        device_kind=built.mesh.devices.flat[0].device_kind,
        devices=built.mesh.size,
        mesh=dict(built.mesh.shape),
        choices=built.choices,
        jaxlib=importlib.metadata.version("jaxlib"),
        compile_seconds=round(time.perf_counter() - started, 1),
        memory=memory,
        out_of_memory=out_of_memory,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longtrain.plan.worker")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--program", type=Path)
    parsed = parser.parse_intermixed_args(arguments)
    try:
        config = load(parsed.config, parsed.overrides)
        devices = parsed.devices or config.mesh.size
        if devices is None:
            raise ConfigError([Problem("mesh", config.mesh.axes, "an axis is -1: give --devices")])
        target = targets.target(parsed.hardware, devices)
        # Nothing of the caller's own flags: they are for the devices that it runs on.
        os.environ.update(target.environment)
        os.environ["XLA_FLAGS"] = " ".join(xla_flags(config, target))
        print(compile_step(config, target, parsed.program).to_json())
    except LongtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
