"""Peak host memory of restoring a state, over the local share of it that stays.

    python scripts/bench_restore.py [--layers N] [--devices N] [--folder DIR]

One process saves a random state of a Llama of 123 MB a layer (float32, with both AdamW moments), another restores it on
simulated devices, as `train` does, and reads its own peak. The figure to watch is `ratio`: peak above what the process
held just before, over the bytes of the state. Linux only.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GOAL = 1.3
WIDTH, MLP = 1024, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="default: 36, a state of 4.2 GiB")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--do", choices=("save", "restore"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.do:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for do in ("save", "restore"):
            common = ["--layers", str(arguments.layers), "--devices", str(arguments.devices), "--folder", str(folder)]
            subprocess.run([sys.executable, __file__, *common, "--do", do], check=True)


def work(arguments: argparse.Namespace) -> None:
    from longtrain.config import from_mapping
    from longtrain.parallel import process

    config = from_mapping(
        {
            "run": {"steps": 1},
            "model": {
                "preset": "tiny",
                "embed_dim": WIDTH,
                "mlp_dim": MLP,
                "num_heads": 8,
                "num_kv_heads": 8,
                "head_dim": WIDTH // 8,
                "num_layers": arguments.layers,
            },
            "sequence_length": 64 * arguments.devices,
            "batch": {"sequences": 1},
            "mesh": {"context": arguments.devices, "simulate_devices": "auto"},
            "optimizer": {"learning_rate": 1e-3},
            "data": {"sources": [{"path": "python-stdlib"}], "tokenizer": "bytes"},
        }
    )
    process.prepare_environment(config)
    import jax

    from longtrain.build import build
    from longtrain.checkpoint import Checkpoints

    built = build(config)
    checkpoints = Checkpoints(arguments.folder, config.checkpoint, say=print)
    if arguments.do == "save":
        checkpoints.save(1, built.initial_state(), {"config": config.model_dump(mode="json")})
        checkpoints.wait()
        checkpoints.close()
        return
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built.state))
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the start-up's own memory is there
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    found = checkpoints.restore(built.state, 1, accept=lambda run: None)
    assert found is not None
    jax.block_until_ready(found[0])
    peak = kilobytes("VmHWM") - before
    ratio = peak * 1024 / size
    print(
        f"state {size / 2**30:.2f} GiB, peak above the start-up {peak / 2**20:.2f} GiB, ratio {ratio:.2f} (goal {GOAL})"
    )
    checkpoints.close()


def kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


if __name__ == "__main__":
    main()
