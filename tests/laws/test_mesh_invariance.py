"""Law 1: a batch gives the same loss, gradients and weights on any mesh, by any strategy, layout and accumulation."""

import itertools

import pytest

import steps

# One of everything: each axis, alone and with others; tensor beyond the two kv heads; each strategy, layout and remat.
CASES = [
    "mesh.data=2 mesh.fsdp=2",
    "mesh.context=2 attention.strategy=ulysses memory.remat=none",
    "mesh.context=4 memory.remat=full attention.two_way=true",
    "mesh.fsdp=2 mesh.context=2 attention.strategy=all_gather attention.layout=zigzag memory.mlp_chunk=8",
    "mesh.fsdp=2 mesh.tensor=4 memory.loss_chunk=7",
    "mesh.data=2 mesh.context=2 mesh.tensor=2 batch.accumulation=4 attention.layout=contiguous",
    "mesh.context=4 attention.ulysses_degree=2 attention.unroll=true",
]

MESHES = [
    "mesh.tensor=2",
    "mesh.context=8",
    "mesh.fsdp=8",
    "mesh.context=2 mesh.tensor=4",
    "mesh.data=2 mesh.fsdp=2 mesh.context=2",
]
WAYS = [
    "attention.strategy=ring attention.layout=dealt",
    "attention.strategy=all_gather attention.layout=contiguous",
    "attention.strategy=ring attention.layout=zigzag model.tie_embeddings=true",
]
MORE = [f"{mesh} {way}" for mesh, way in itertools.product(MESHES, WAYS)] + [
    "mesh.fsdp=2 mesh.context=2 attention.strategy=ulysses attention.layout=dealt batch.accumulation=2",
    "mesh.context=2 mesh.data=4 attention.strategy=ulysses attention.layout=zigzag",
    "mesh.context=4 model.num_kv_heads=1 mesh.tensor=2",
    "mesh.context=8 attention.ulysses_degree=2 attention.two_way=true model.num_kv_heads=4",
    "mesh.fsdp=2 mesh.context=4 attention.ulysses_degree=2 attention.layout=zigzag",
    "mesh.context=4 attention.two_way=true attention.unroll=true",
    "mesh.context=4 attention.strategy=all_gather attention.unroll=true model.num_kv_heads=4",
    "mesh.fsdp=4 mesh.context=2 memory.loss_chunk=1 memory.mlp_chunk=1 batch.accumulation=2",
]


def check(case: str) -> None:
    overrides = case.split()
    model_alone = [override for override in overrides if override.startswith("model.")]
    steps.assert_same(steps.observe(*overrides), steps.observe(*model_alone))


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_many_devices_is_the_step_on_one(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_meshes_strategies_layouts_and_models(case):
    check(case)
