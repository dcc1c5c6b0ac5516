"""Law 6: the plan tells the truth about FLOPs and memory."""

from pathlib import Path

import pytest

from longtrain.config import load
from longtrain.plan.estimate import plan

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_8b_64k", "llama3_8b_256k", "llama3_8b_1m"])
@pytest.mark.parametrize("kind", ["H100", "GB200"])
def test_flops_are_the_published_formula(name: str, kind: str):
    """For Llama 3 8B and one document a row: 4.503e10 + 7.864e5 S a token."""
    config = load(CONFIGS / f"{name}.yaml")
    planned = plan(config, kind)
    tokens = config.batch.sequences * config.sequence_length
    assert planned.flops_per_step == pytest.approx(tokens * (4.503e10 + 7.864e5 * config.sequence_length), rel=1e-4)
    assert planned.parameters == 8_030_261_248


def test_packed_documents_cost_their_own_length():
    config = load(CONFIGS / "llama3_8b_256k.yaml")
    planned = plan(config, "H100", document_tokens=4096)
    tokens = config.batch.sequences * config.sequence_length
    assert planned.flops_per_step == pytest.approx(tokens * (4.503e10 + 7.864e5 * 4096), rel=1e-4)
