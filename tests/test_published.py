"""The plan against published training speeds: within 20 % where the method is ours."""

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from longtrain.config import load
from longtrain.plan import assumptions
from longtrain.plan.estimate import Plan, plan

HERE = Path(__file__).parent
ROWS = yaml.safe_load((HERE / "published.yaml").read_text())
WITHIN = 0.20
WAYS = ("forward", "backward")


def planned(row: dict[str, Any], folder: Path) -> Plan:
    """The plan of the row, with the speed of a fused attention kernel, which all these runs had."""
    shipped = yaml.safe_load(resources.files("longtrain.plan").joinpath(assumptions.TABLE).read_text())
    fused = {f"attention_{way}_efficiency": shipped[f"attention_{way}_efficiency"]["value"]["default"] for way in WAYS}
    (folder / "fused.yaml").write_text(yaml.safe_dump(fused))
    overrides = ["batch.accumulation=1", "eval.every_steps=null", *row["overrides"]]
    config = load(HERE.parent / "configs" / "llama3_8b.yaml", overrides)
    return plan(config, row["hardware"], devices=row["devices"], assumptions_file=folder / "fused.yaml")


def seen(row: dict[str, Any], like: Plan) -> float:
    """Tokens a second and device."""
    ((unit, figure),) = row["seen"].items()
    tokens = like.config.batch.sequences * like.config.sequence_length
    return {
        "tokens": figure,
        "step_seconds": tokens / figure / row["devices"],
        "tflops": figure * 1e12 / (like.flops_per_step / tokens),
    }[unit]


def test_the_plan_is_near_what_was_published(tmp_path: Path):
    lines, far = ["", f"{'published':>10} {'planned':>8}   tokens a second and device"], []
    for row in ROWS:
        ours = planned(row, tmp_path)
        published, predicted = seen(row, ours), ours.tokens_per_second_per_device
        off = predicted / published - 1
        note = f"(not ours: {row['not_ours']})" if "not_ours" in row else ""
        where = f"{row['devices']} x {row['hardware']}"
        lines.append(f"{published:10,.0f} {predicted:8,.0f} {off:+5.0%}  {where}, {row['run']} {note}")
        if not note and abs(off) > WITHIN:
            far.append(row["run"])
    table = "\n".join(lines)
    print(table)
    assert not far, table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_a_row_names_its_source(row: dict[str, Any]):
    assert row["source"].startswith("https://") and set(row["seen"]) <= {"tokens", "step_seconds", "tflops"}
