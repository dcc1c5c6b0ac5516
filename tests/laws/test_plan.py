"""Law 6: the plan tells the truth about FLOPs and memory."""

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import compiled_memory
from longtrain.config import load
from longtrain.plan.estimate import Plan, plan

CONFIGS = Path(__file__).parents[2] / "configs"
WITHIN = 0.15

PLUGINS = {"jax-cuda12-plugin", "jax-cuda13-plugin"}
needs_gpu_plugin = pytest.mark.skipif(
    not PLUGINS & {distribution.name for distribution in importlib.metadata.distributions()},
    reason="needs the extra `plan` (jax-cuda13-plugin)",
)


@pytest.mark.parametrize("name", compiled_memory.SHIPPED)
@pytest.mark.parametrize("kind", compiled_memory.KINDS)
def test_flops_are_the_published_formula(name: str, kind: str):
    """For Llama 3 8B and one document a row: 4.503e10 + 7.864e5 S a token."""
    config = load(CONFIGS / f"{name}.yaml")
    planned = plan(config, kind)
    tokens = config.batch.sequences * config.sequence_length
    assert planned.flops_per_step == pytest.approx(tokens * (4.503e10 + 7.864e5 * config.sequence_length), rel=1e-4)
    assert planned.parameters == 8_030_261_248
    assert planned.share.devices == compiled_memory.SHIPPED[name]


def test_packed_documents_cost_their_own_length():
    config = load(CONFIGS / "llama3_8b_256k.yaml")
    planned = plan(config, "H100", document_tokens=4096)
    tokens = config.batch.sequences * config.sequence_length
    assert planned.flops_per_step == pytest.approx(tokens * (4.503e10 + 7.864e5 * 4096), rel=1e-4)


def planned_as(row: dict[str, Any]) -> Plan:
    """The plan of a recorded case, with the kernel that was compiled."""
    config = load(CONFIGS / f"{row['config']}.yaml", [*row["overrides"], f"attention.kernel={row['kernel']}"])
    return plan(config, row["hardware"], devices=row["devices"])


def case(row: dict[str, Any]) -> str:
    return " ".join([row["config"], row["hardware"], *row["overrides"]])


@pytest.mark.parametrize("row", compiled_memory.recorded(), ids=case)
def test_memory_is_within_15_percent_of_the_compilers_own(row: dict[str, Any]):
    """Against the record; `test_the_record_is_what_the_compiler_says` holds the record to the compiler."""
    assert planned_as(row).memory.total == pytest.approx(row["needed"], rel=WITHIN)


def test_every_shipped_config_is_recorded():
    of_shipped = {(row["config"], row["hardware"]) for row in compiled_memory.recorded() if not row["overrides"]}
    assert of_shipped == {(name, kind) for name in compiled_memory.SHIPPED for kind in compiled_memory.KINDS}
    paths = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in CONFIGS.rglob("*.yaml")}
    large = {name for name, path in paths.items() if plan(load(path), "H100").parameters >= 1e9}
    assert large == set(compiled_memory.SHIPPED), "name it in compiled_memory.SHIPPED and record it"


def sent(row: dict[str, Any]) -> dict[str, float]:
    """The plan's bytes by collective and axes, as the record has them."""
    planned, found = planned_as(row), Counter[str]()
    for transfer in planned.timing.transfers:
        axes = " x ".join(axis for axis in transfer.axes if planned.share.mesh.axes[axis] > 1)
        found[f"{transfer.kind} over {axes}"] += transfer.bytes
    return found


@pytest.mark.parametrize("row", [row for row in compiled_memory.recorded() if "sent" in row], ids=case)
def test_what_is_sent_is_what_the_compiled_program_sends(row: dict[str, Any]):
    """Each collective over each axis to 1 %, but for the little (tokens, norms, counts) that no plan needs."""
    little = 2e-3 * sum(row["sent"].values())
    planned, compiled = (
        {what: bytes_sent for what, bytes_sent in told.items() if bytes_sent > little}
        for told in (sent(row), row["sent"])
    )
    assert planned == pytest.approx(compiled, rel=0.01)


@pytest.mark.slow
@pytest.mark.ahead_of_time
@needs_gpu_plugin
def test_the_record_is_what_the_compiler_says():
    """One case, compiled anew (a minute); `python tests/compiled_memory.py` does them all."""
    of_shipped = (row for row in compiled_memory.recorded() if not row["overrides"])
    row = next(row for row in of_shipped if (row["config"], row["hardware"]) == ("llama3_8b_256k", "GB200"))
    kernel = f"attention.kernel={row['kernel']}"
    now = compiled_memory.compiled(row["config"], row["hardware"], row["devices"], [kernel])
    assert now["needed"] == pytest.approx(row["needed"], rel=0.02)
    assert now["sent"] == pytest.approx(row["sent"], rel=0.02)
