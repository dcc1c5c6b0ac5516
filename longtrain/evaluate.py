"""Held-out loss: the same number on every mesh, from the same rows every time."""

import functools
import math
from typing import Any

import jax

from longtrain.build import Build, build
from longtrain.checkpoint import Say, folder_of
from longtrain.config import Config
from longtrain.data.everywhere import ensure_everywhere
from longtrain.data.loader import Batches
from longtrain.data.prepare import Prepared
from longtrain.data.rows import RowIndex
from longtrain.data.rowsource import RowStats
from longtrain.errors import ConfigError, Problem
from longtrain.metrics import finite_or_none
from longtrain.model import Params
from longtrain.resume import load_weights


class Evaluator:
    """Evaluates weights on the first `eval.sequences` held-out rows. Compiles once, reads the same rows each time.

    Raises:
      ConfigError: when there are fewer held-out rows than `eval.sequences`, or the mesh cannot share them.
    """

    def __init__(self, build: Build, prepared: Prepared):
        config = build.config
        self._build = build
        self._index = RowIndex.of(config, prepared, "eval")
        wanted, held_out = config.eval.sequences, self._index.rows_per_epoch
        shards = build.mesh.shape["data"] * build.mesh.shape["fsdp"]
        if held_out < wanted:
            message = (
                f"data.eval_fraction = {config.data.eval_fraction} holds out {held_out} rows; "
                "legal: at most that many, or a larger eval_fraction"
            )
            raise ConfigError([Problem("eval.sequences", wanted, message)])
        if wanted % shards:
            raise ConfigError(
                [Problem("eval.sequences", wanted, f"legal: a multiple of mesh.data x mesh.fsdp = {shards}")]
            )
        micro = config.batch.sequences // config.batch.accumulation
        self._rows = micro if wanted % micro == 0 else shards

    @functools.cached_property
    def _step(self) -> jax.stages.Compiled:
        return self._build.eval_step(self._rows)

    def compile(self) -> None:
        """Compiles now, so that the first evaluation need not wait for it."""
        _ = self._step

    def __call__(self, parameters: Params) -> dict[str, Any]:
        """`eval_loss` (nats a token), `eval_perplexity`, `eval_tokens` (targets counted), `eval_documents`."""
        batches = Batches(
            self._index,
            mesh=self._build.mesh,
            deal=self._build.how.deal,
            sequences=self._rows,
            accumulation=1,
            first_row=0,
            prefetch=self._build.config.data.prefetch,
            workers=0,
        )
        try:
            count = self._build.config.eval.sequences // self._rows
            sums = [jax.device_get(self._step(parameters, next(batches))) for _ in range(count)]
        finally:
            batches.close()
        weight = sum(float(part["weight_sum"]) for part in sums)
        loss = sum(float(part["loss_sum"]) for part in sums) / weight
        return {
            "eval_loss": finite_or_none(loss),
            "eval_perplexity": finite_or_none(math.exp(min(loss, 700.0))),
            "eval_tokens": sum(int(part["valid_tokens"]) for part in sums),
            "eval_documents": sum(RowStats.of(part["row_stats"]).documents for part in sums),
        }


def evaluate_run(config: Config, step: int | None, say: Say) -> dict[str, Any]:
    """The eval line of a run's checkpoint (None: the newest): `step` and what `Evaluator` gives.

    Raises:
      CheckpointError, ConfigError: when there is no such checkpoint or it is of another model or tokenizer.
    """
    folder_of(config.run_dir)  # before minutes are spent on data
    built = build(config)
    built.check_permutes()
    prepared = ensure_everywhere(config, say)
    evaluate = Evaluator(built, prepared)
    parameters, record = load_weights(built, prepared, config.run_dir, step=step, say=say)
    if record["data_plan"] != RowIndex.of(config, prepared, "train").fingerprint:
        say(
            "the data plan is not that checkpoint's: sources, packing, weights, sequence_length, run.seed or "
            "data.eval_fraction are others here; documents held out now may have been trained on"
        )
    return {"step": record["position"]["step"]} | evaluate(parameters)
