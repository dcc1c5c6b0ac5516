"""Law 2: documents do not see each other, to the last bit.

Each token of a row is an id of its own, so a row of the embedding's gradient is the gradient at one position. A changed
document takes its ids from a second range, whose embeddings are a hundred times as large.
"""

import jax
import numpy as np
import pytest
from flax import nnx

import steps
import tiny
from longtrain.build import build

DOCUMENTS = [[20, 31, 9], [64], [1, 40, 2, 11], [33, 30]]
PLACES = len(DOCUMENTS) * steps.LENGTH

CASES = [
    "",
    "mesh.context=4 attention.two_way=true",
    "mesh.fsdp=2 mesh.context=2 mesh.tensor=2 attention.layout=zigzag",
    "mesh.context=2 attention.strategy=all_gather attention.layout=contiguous",
    "mesh.context=2 attention.strategy=ulysses attention.layout=dealt",
    "mesh.context=4 attention.ulysses_degree=2 attention.unroll=true",
]
MORE = [
    "mesh.context=8",
    "mesh.data=2 mesh.context=2 attention.layout=contiguous",
    "mesh.tensor=4 mesh.context=2",
    "mesh.context=4 attention.strategy=all_gather attention.layout=dealt memory.remat=full",
    "mesh.fsdp=2 mesh.context=2 attention.strategy=all_gather attention.layout=zigzag",
    "mesh.context=2 attention.strategy=ulysses attention.layout=contiguous memory.remat=none",
    "mesh.context=4 model.compute_dtype=bfloat16",
    "mesh.context=8 attention.ulysses_degree=2 attention.two_way=true model.num_kv_heads=4 attention.layout=zigzag",
]


def changed(batch: steps.Batch, row: int, document: int) -> tuple[steps.Batch, np.ndarray]:
    """The batch with other tokens in one document, and where that is."""
    there = np.zeros_like(batch["segments"], bool)
    there[row] = batch["segments"][row] == document
    return batch | {"tokens": np.where(there, batch["tokens"] + PLACES, batch["tokens"])}, there


def check(case: str) -> None:
    config = tiny.config("batch.sequences=4", *case.split())
    assert config.model.vocab_size >= 2 * PLACES
    built = build(config, steps.devices(config))
    values = steps.parameters(config.model)
    values["embed_VD"][PLACES:] *= 100
    weights = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), values, built.state.parameters)
    batch = steps.packed_rows(DOCUMENTS, steps.LENGTH, config.model.vocab_size)
    batch["tokens"] = np.arange(PLACES, dtype=np.int32).reshape(batch["tokens"].shape)

    def loss(parameters, batch):
        losses_BS = nnx.merge(built.graph, parameters).losses(batch, built.how)
        return (losses_BS * batch["weights"]).sum(), losses_BS

    step = jax.jit(jax.grad(loss, has_aux=True)).lower(weights, steps.place(built, batch)).compile(steps.QUICK)

    def run(batch: steps.Batch) -> tuple[np.ndarray, np.ndarray]:
        """Each token's loss [B, S] and the gradient at each token's own embedding [B, S, D]."""
        gradients, losses_BS = step(weights, steps.place(built, batch))
        return steps.in_document_order(built, losses_BS), np.asarray(gradients["embed_VD"])[batch["tokens"]]

    losses, gradients = run(batch)
    for row, document in [(0, 2), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]:
        other, there = changed(batch, row, document)
        other_losses, other_gradients = run(other)
        kept = ~there & (batch["segments"] > 0)
        np.testing.assert_array_equal(other_losses[kept], losses[kept])
        np.testing.assert_array_equal(other_gradients[kept], gradients[kept])
        # The change itself is seen, and what is compared is not all zeros.
        assert (other_losses[there] != losses[there]).all()
        assert np.abs(gradients[kept]).max() > 0


@pytest.mark.parametrize("case", CASES)
def test_a_changed_document_moves_no_bit_of_another(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_nor_on_other_meshes_and_layouts(case):
    check(case)
