"""The held-out loss of a bigram model counted from a config's training tokens, for comparison with a run's `eval_loss`.

    python scripts/bigram_baseline.py configs/quickstart.yaml [key=value ...]

Both are nats a target, over the same held-out rows (the first `eval.sequences`) and the same targets. The bigram model
is a strong one: counted over one whole epoch of training rows, however many steps the run takes, with absolute
discounting towards the unigram model (Ney, Essen and Kneser 1994), its discount chosen to suit the held-out rows best.
"""

import argparse
import json

import numpy as np

from longtrain.config import Config, load
from longtrain.data import prepare
from longtrain.data.rows import RowIndex

DISCOUNTS = (0.1, 0.3, 0.5, 0.7, 0.9)

Pairs = tuple[np.ndarray, np.ndarray]


def pairs(index: RowIndex, rows: int) -> Pairs:
    """The (token, target) pairs of the first rows that count in the loss."""
    found = [index.row(number) for number in range(rows)]
    counted = [row.weights > 0 for row in found]
    tokens = np.concatenate([row.tokens[here] for row, here in zip(found, counted, strict=True)])
    targets = np.concatenate([row.targets[here] for row, here in zip(found, counted, strict=True)])
    return tokens, targets


def held_out_loss(train: Pairs, held_out: Pairs, vocabulary: int) -> float:
    """Nats a target of the best discount."""
    counts_VV = np.zeros((vocabulary, vocabulary))
    np.add.at(counts_VV, train, 1)
    unigram_V = counts_VV.sum(0) + 1
    unigram_V /= unigram_V.sum()
    seen_V1 = counts_VV.sum(1, keepdims=True)
    kinds_V1 = (counts_VV > 0).sum(1, keepdims=True)

    def loss(discount: float) -> float:
        discounted_VV = np.maximum(counts_VV - discount, 0) + discount * kinds_V1 * unigram_V
        probabilities_VV = np.where(seen_V1 > 0, discounted_VV / np.maximum(seen_V1, 1), unigram_V)
        return float(-np.log(probabilities_VV[held_out]).mean())

    return min(loss(discount) for discount in DISCOUNTS)


def baseline(config: Config) -> dict[str, float]:
    prepared = prepare.ensure(config, log=print)

    def index(split: str) -> RowIndex:
        return RowIndex.of(config, prepared, split)

    train = index("train")
    targets = pairs(train, train.rows_per_epoch)
    held_out = pairs(index("eval"), config.eval.sequences)
    loss = held_out_loss(targets, held_out, prepared.vocab_size)
    return {"bigram_loss": loss, "train_targets": len(targets[0]), "held_out_targets": len(held_out[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.overrides)
    print(json.dumps(baseline(config)))
    metrics = config.run_dir / "metrics.jsonl"
    if metrics.exists():
        evals = [line for line in map(json.loads, metrics.read_text().splitlines()) if "eval_loss" in line]
        for line in evals:
            print(f"{config.run_dir} step {line['step']}: eval_loss {line['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
