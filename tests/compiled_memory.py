"""What the compiler says that a train step needs of a device and what it sends: the record in compiled_memory.yaml,
and how it is made.

    python tests/compiled_memory.py         compiles every case again and rewrites the record; needs the extra `plan`
    python tests/compiled_memory.py --new   only those that the record has not, and adds them
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from longtrain.plan.program import Program

HERE = Path(__file__).parent
RECORD = HERE / "compiled_memory.yaml"

SHIPPED = {
    "llama3_8b": 8,
    "llama3_8b_64k": 16,
    "llama3_8b_256k": 32,
    "llama3_8b_1m": 128,
    "benchmarks/llama3_8b_64k_4gpus": 4,
    "benchmarks/llama3_8b_64k_8gpus": 8,
    "benchmarks/llama3_8b_64k_16gpus": 16,
    "benchmarks/llama3_8b_128k_32gpus": 32,
    "benchmarks/llama3_8b_256k_32gpus": 32,
    "benchmarks/llama3_8b_256k_64gpus": 64,
}
"""The shipped configs of 1B parameters and more, and their devices."""

KINDS = ("GB200", "H100")

# Besides the shipped configs as they are: every remat, strategy, chunk and kernel, other models and meshes.
VARIANTS = [
    ("llama3_8b_64k", "H100", 16, ["memory.remat=full", "memory.mlp_chunk=2048", "memory.loss_chunk=256"]),
    ("llama3_8b_64k", "H100", 8, ["model.preset=llama3.2_1b", "mesh.fsdp=2", "memory.remat=none"]),
    ("llama3_8b_64k", "H100", 16, ["attention.kernel=xla"]),
    ("llama3_8b_64k", "H100", 16, ["attention.strategy=all_gather"]),
    ("llama3_8b_64k", "H100", 16, ["attention.strategy=ulysses"]),
    ("llama3_8b_64k", "H100", 8, ["model.preset=llama3.2_1b", "mesh.fsdp=2"]),
    ("llama3_8b_256k", "GB200", 32, ["mesh.fsdp=4", "mesh.context=8", "mesh.tensor=1", "batch.accumulation=4"]),
    ("llama3_8b_64k", "H100", 32, ["model.preset=llama3_70b", "mesh.fsdp=8", "batch.accumulation=4"]),
]


def cases() -> list[tuple[str, str, int, list[str]]]:
    """(config, hardware, devices, overrides) of each case."""
    shipped: list[tuple[str, str, int, list[str]]] = [
        (name, kind, devices, []) for name, devices in SHIPPED.items() for kind in KINDS
    ]
    return shipped + VARIANTS


def compiled(name: str, kind: str, devices: int, overrides: list[str]) -> dict[str, Any]:
    """A case's record: what the compiler says of it, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.hlo"
        command = [sys.executable, "-m", "longtrain.plan.worker", str(HERE.parent / "configs" / f"{name}.yaml")]
        command += [*overrides, "--hardware", kind, "--devices", str(devices), "--program", str(program)]
        said = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr[-2000:]
        result = json.loads(said.stdout.splitlines()[-1])
        traffic = sent(program.read_text(), result["mesh"])
    kernel = next(choice.split()[1] for choice in result["choices"] if choice.startswith("attention.kernel"))
    return {
        "config": name,
        "hardware": kind,
        "devices": devices,
        "overrides": overrides,
        "kernel": kernel,
        "jaxlib": result["jaxlib"],
        "needed": result["memory"]["needed"],
        "sent": traffic,
    }


def sent(program: str, mesh: dict[str, int]) -> dict[str, int]:
    """Bytes that a device sends in a step, by collective and the axes it joins."""
    found: Counter[str] = Counter()
    for collective in Program.read(program, mesh, "cuda").collectives:
        kind = collective.kind.removeprefix("collective-")
        found[f"{kind} over {' x '.join(collective.axes)}"] += int(collective.bytes * collective.times)
    return dict(found)


def recorded() -> list[dict[str, Any]]:
    """The record as it stands."""
    return yaml.safe_load(RECORD.read_text())


def main() -> None:
    rows = recorded() if "--new" in sys.argv else []
    known = {(row["config"], row["hardware"], row["devices"], *row["overrides"]) for row in rows}
    for case in cases():
        name, kind, devices, overrides = case
        if (name, kind, devices, *overrides) in known:
            continue
        try:
            rows.append(compiled(*case))
        except AssertionError as error:
            print(case, "failed:", error, file=sys.stderr)
            continue
        print(rows[-1], flush=True)
    write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Writes the record."""
    head = "# Made by tests/compiled_memory.py: bytes of a device by the compiler's own account.\n"
    RECORD.write_text(head + "".join(yaml.safe_dump([row], sort_keys=False, width=1000) for row in rows))


if __name__ == "__main__":
    main()
