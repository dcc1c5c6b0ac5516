"""The FLOPs formula against the figures the design states and the shapes the presets are published with."""

import pytest

from longtrain import config, flops
from longtrain.config import ModelConfig


def model(preset: str) -> ModelConfig:
    tree = {
        "run": {"steps": 1},
        "model": {"preset": preset},
        "sequence_length": 8192,
        "batch": {"sequences": 1},
        "optimizer": {"learning_rate": 1e-3},
        "data": {"sources": [{"path": "python-stdlib"}], "tokenizer": "tokenizer.model"},
    }
    return config.from_mapping(tree).model


@pytest.mark.parametrize("length", [1, 8192, 262_144, 1_048_576])
def test_llama3_8b_costs_what_the_design_says(length: int):
    per_token = flops.step_flops(model("llama3_8b"), [length]) / length
    assert per_token == pytest.approx(4.503e10 + 7.864e5 * length, rel=1e-4)


def test_a_packed_row_costs_what_its_pieces_cost():
    llama = model("llama3_8b")
    packed = flops.step_flops(llama, [3000, 1000, 96])
    assert packed == sum(flops.step_flops(llama, [length]) for length in (3000, 1000, 96))
    assert packed == flops.flops_of_sums(llama, 4096, 3000**2 + 1000**2 + 96**2)
    assert packed < flops.step_flops(llama, [4096])


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [  # as published with the weights
        ("llama3_8b", 8_030_261_248),
        ("llama3.1_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3.2_1b", 1_235_814_400),
    ],
)
def test_a_preset_has_the_parameters_it_is_published_with(preset: str, parameters: int):
    assert flops.parameters(model(preset)) == parameters


def test_a_tied_head_is_computed_like_an_untied_one():
    tied = model("llama3.2_1b")
    untied = tied.model_copy(update={"tie_embeddings": False})
    assert flops.flops_of_sums(tied, 10, 100) == flops.flops_of_sums(untied, 10, 100)
    assert flops.parameters(untied) - flops.parameters(tied) == tied.vocab_size * tied.embed_dim
