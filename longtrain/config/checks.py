"""What several keys must satisfy together, divisibility by the mesh above all, before any device is touched.

A check states the keys it needs and runs when all of them are valid, whatever else is wrong with the config.
While one axis of the mesh is -1, what the other axes demand is checked; the rest is when the number of devices
is known: at once where they are simulated and counted, else in `resolve_mesh`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from math import gcd, isqrt, prod
from typing import Any

from longtrain.config.reading import leaves
from longtrain.config.schema import Config, MeshConfig
from longtrain.errors import ConfigError, Problem

Values = Mapping[str, Any]
"""Dotted key -> valid value."""

AXES = ("mesh.data", "mesh.fsdp", "mesh.context", "mesh.tensor")

BYTES_VOCABULARY = 258
"""Size of the `bytes` tokenizer: 256 bytes, begin and end of a document."""

_CHECKS: list[tuple[tuple[str, ...], Callable[[Values], Iterator[Problem]]]] = []


def _needs(
    *keys: str,
) -> Callable[[Callable[[Values], Iterator[Problem]]], Callable[[Values], Iterator[Problem]]]:
    def register(check: Callable[[Values], Iterator[Problem]]) -> Callable[[Values], Iterator[Problem]]:
        _CHECKS.append((keys, check))
        return check

    return register


def cross_problems(values: Values) -> list[Problem]:
    """The problems between keys that are valid each by itself."""
    free = _simulated_axis(values)
    values = {**values, **free}
    problems = [
        problem for keys, check in _CHECKS if all(key in values for key in keys) for problem in check(values)
    ]
    for axis, size in free.items():
        why = f"({axis} is -1: {size} on mesh.simulate_devices = {values['mesh.simulate_devices']})"
        problems = [
            dataclasses.replace(problem, message=f"{problem.message} {why}")
            if axis in f"{problem.key} {problem.message}"
            else problem
            for problem in problems
        ]
    return problems


def _simulated_axis(values: Values) -> dict[str, int]:
    """The axis that is -1 with the size that a number of simulated devices gives it; else nothing."""
    devices = values.get("mesh.simulate_devices")
    free = [key for key in AXES if values.get(key) == -1]
    if not isinstance(devices, int) or len(free) != 1 or any(key not in values for key in AXES):
        return {}
    size, left_over = divmod(devices, _product(values, *AXES))
    return {} if left_over else {free[0]: size}


def resolve_mesh(config: Config, device_count: int) -> MeshConfig:
    """The mesh with its -1 replaced so that it takes all devices.

    Raises ConfigError where the mesh cannot take exactly `device_count` devices, or where the size found
    fails a check that had to wait for it.
    """
    axes = config.mesh.axes
    known = prod(size for size in axes.values() if size != -1)
    written = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    if config.mesh.size is None and device_count % known:
        message = f"the other axes need a multiple of {known} devices; there are {device_count}"
        raise ConfigError([Problem("mesh", written, message)], source="the mesh")
    if config.mesh.size is not None and config.mesh.size != device_count:
        message = (
            f"takes {known} devices, there are {device_count}: "
            f"the product of the axes must be {device_count}, or one axis -1 to take all that are left"
        )
        raise ConfigError([Problem("mesh", written, message)], source="the mesh")
    sizes = {axis: device_count // known if size == -1 else size for axis, size in axes.items()}
    mesh = config.mesh.model_copy(update=sizes)
    values = dict(leaves(config.model_dump())) | {f"mesh.{axis}": size for axis, size in sizes.items()}
    if problems := cross_problems(values):
        raise ConfigError(problems, source=f"the mesh {written} on {device_count} devices")
    return mesh


def _product(values: Values, *keys: str) -> int:
    """The product of the sizes that are known."""
    return prod(values[key] for key in keys if values[key] != -1)


def _multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 12 else f"{', '.join(map(str, numbers[:12]))}, ..."


def _divisors(number: int) -> list[int]:
    """The divisors that a number of devices could be."""
    return [divisor for divisor in range(1, min(number, 1 << 16) + 1) if number % divisor == 0]


def _nearest_divisors(number: int, value: int) -> str:
    """The divisors of `number` around `value`, which is between 1 and it (of numbers to 2^32; some of larger ones)."""
    small = [divisor for divisor in range(1, min(isqrt(number), 1 << 16) + 1) if number % divisor == 0]
    divisors = [*small, *(number // divisor for divisor in small)]
    return f"{max(d for d in divisors if d <= value)} or {min(d for d in divisors if d > value)}"


def _either_divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


@_needs(*AXES)
def _one_free_axis(values: Values) -> Iterator[Problem]:
    free = [key for key in AXES if values[key] == -1]
    if len(free) > 1:
        yield Problem(free[-1], -1, f"only one axis may be -1, and {', '.join(free[:-1])} is -1 already")


@_needs("mesh.simulate_devices", *AXES)
def _simulated_devices(values: Values) -> Iterator[Problem]:
    asked, known = values["mesh.simulate_devices"], _product(values, *AXES)
    free = any(values[key] == -1 for key in AXES)
    if asked == "auto" and free:
        message = "auto takes the mesh's product, unknown while an axis is -1: give a number, or the axis"
        yield Problem("mesh.simulate_devices", asked, message)
    elif isinstance(asked, int) and free and asked % known:
        message = f"must be a multiple of the product of the other axes, {known}: {_multiples(asked, known)}"
        yield Problem("mesh.simulate_devices", asked, message)
    elif isinstance(asked, int) and not free and asked != known:
        yield Problem("mesh.simulate_devices", asked, f"must be the mesh's product, {known}, or auto")


@_needs("batch.sequences", "batch.accumulation", "mesh.data", "mesh.fsdp")
def _batch(values: Values) -> Iterator[Problem]:
    sequences = values["batch.sequences"]
    parts = _product(values, "mesh.data", "mesh.fsdp", "batch.accumulation")
    if sequences % parts:
        message = (
            f"must be a multiple of mesh.data x mesh.fsdp x batch.accumulation = {parts}: "
            f"{_multiples(sequences, parts)}"
        )
        yield Problem("batch.sequences", sequences, message)


@_needs("sequence_length", "mesh.context", "attention.layout", "attention.ulysses_degree")
def _sequence(values: Values) -> Iterator[Problem]:
    length, context = values["sequence_length"], _product(values, "mesh.context")
    # Zigzag halves what each member of the ring holds; of an even number of shards that is whole shards.
    halved = values["attention.layout"] == "zigzag" and values["attention.ulysses_degree"] % 2
    parts, what = (2 * context, "2 x mesh.context (zigzag)") if halved else (context, "mesh.context")
    if length % parts:
        message = f"must be a multiple of {what} = {parts}: {_multiples(length, parts)}"
        yield Problem("sequence_length", length, message)


@_needs("memory.mlp_chunk", "sequence_length", "mesh.context")
def _mlp_chunk(values: Values) -> Iterator[Problem]:
    """A chunk of at least a device's part of the sequence is the whole part."""
    chunk, length, context = values["memory.mlp_chunk"], values["sequence_length"], values["mesh.context"]
    if chunk is None or context == -1 or length % context:
        return
    local = length // context
    if chunk < local and local % chunk:
        message = (
            f"must divide a device's part of the sequence, sequence_length / mesh.context = {local}: "
            f"{_nearest_divisors(local, chunk)}; or null for the whole"
        )
        yield Problem("memory.mlp_chunk", chunk, message)


@_needs("memory.offload", "memory.remat", "mesh.simulate_devices")
def _offload(values: Values) -> Iterator[Problem]:
    if values["memory.offload"] == "none":
        return
    if values["memory.remat"] == "none":
        message = "must be none with memory.remat none, which keeps everything a layer computes, named or not"
        yield Problem("memory.offload", values["memory.offload"], message)
    if values["mesh.simulate_devices"] is not None:
        message = "must be none: simulated devices are the CPU's, and have no memory but the host's"
        yield Problem("memory.offload", values["memory.offload"], message)


@_needs("mesh.tensor")
def _tensor(values: Values) -> Iterator[Problem]:
    """Heads, hidden width and vocabulary are sharded over tensor; kv heads fewer than shards are repeated."""
    tensor = values["mesh.tensor"]
    sharded = {
        key: values[key] for key in ("model.num_heads", "model.mlp_dim", "model.vocab_size") if key in values
    }
    kv_heads = values.get("model.num_kv_heads")
    reasons = [f"{key} = {size}" for key, size in sharded.items() if size % tensor]
    if kv_heads is not None and not _either_divides(kv_heads, tensor):
        reasons.append(f"model.num_kv_heads = {kv_heads} (or be a multiple of it)")
    if tensor != -1 and reasons:
        fitting = [
            divisor
            for divisor in _divisors(min(sharded.values(), default=1))
            if all(size % divisor == 0 for size in sharded.values())
            and (kv_heads is None or _either_divides(kv_heads, divisor))
        ]
        yield Problem("mesh.tensor", tensor, f"must divide {', '.join(reasons)}; legal: {_numbers(fitting)}")


@_needs("model.embed_dim", "mesh.fsdp", "mesh.context")
def _parameter_shards(values: Values) -> Iterator[Problem]:
    embed, shards = values["model.embed_dim"], _product(values, "mesh.fsdp", "mesh.context")
    if embed % shards:
        message = (
            f"must be a multiple of mesh.fsdp x mesh.context = {shards}, over which parameters are sharded: "
            f"{_multiples(embed, shards)}; or their product one of {_numbers(_divisors(embed))}"
        )
        yield Problem("model.embed_dim", embed, message)


def _local_kv_heads(values: Values) -> tuple[int, str]:
    """The key/value heads of a device, and how they come about. Query heads are in equal groups: what divides the
    one divides the other."""
    heads, tensor = values["model.num_kv_heads"], _product(values, "mesh.tensor")
    local = max(heads // tensor, 1)
    return local, f"the key/value heads of a device, {local} (model.num_kv_heads = {heads} over mesh.tensor = {tensor})"


@_needs("attention.strategy", "model.num_kv_heads", "mesh.context", "mesh.tensor")
def _ulysses(values: Values) -> Iterator[Problem]:
    """Ulysses exchanges the sequence's shards for shards of heads, on top of those over tensor."""
    local_kv_heads, told = _local_kv_heads(values)
    context = _product(values, "mesh.context")
    if values["attention.strategy"] == "ulysses" and local_kv_heads % context:
        message = (
            f"with attention.strategy ulysses it must divide {told}; "
            f"legal: {_numbers(_divisors(local_kv_heads))}, or attention.strategy ring or all_gather"
        )
        yield Problem("mesh.context", context, message)


@_needs("attention.strategy", "attention.ulysses_degree", "model.num_kv_heads", "mesh.context", "mesh.tensor")
def _ulysses_degree(values: Values) -> Iterator[Problem]:
    degree, strategy, context = values["attention.ulysses_degree"], values["attention.strategy"], values["mesh.context"]
    if strategy != "ring":
        if degree != 1:
            yield Problem("attention.ulysses_degree", degree, f"must be 1: attention.strategy {strategy} has no ring")
        return
    local_kv_heads, told = _local_kv_heads(values)
    both = local_kv_heads if context == -1 else gcd(context, local_kv_heads)
    if both % degree:
        message = f"must divide mesh.context = {context} and {told}; legal: {_numbers(_divisors(both))}"
        yield Problem("attention.ulysses_degree", degree, message)


@_needs(
    "attention.strategy",
    "attention.two_way",
    "attention.ulysses_degree",
    "model.num_kv_heads",
    "mesh.context",
    "mesh.tensor",
)
def _two_way(values: Values) -> Iterator[Problem]:
    if not values["attention.two_way"]:
        return
    if values["attention.strategy"] != "ring":
        yield Problem("attention.two_way", True, f"must be false: strategy {values['attention.strategy']} has no ring")
        return
    degree = values["attention.ulysses_degree"]
    if degree == values["mesh.context"] > 1:
        message = f"must be false: attention.ulysses_degree = {degree} = mesh.context leaves no ring"
        yield Problem("attention.two_way", True, message)
        return
    local_kv_heads, told = _local_kv_heads(values)
    if values["mesh.context"] > 1 and local_kv_heads % degree == 0 and local_kv_heads // degree % 2:
        message = (
            f"must be false, since half of the heads goes each way and {told}, over attention.ulysses_degree = "
            f"{degree} are not an even number"
        )
        yield Problem("attention.two_way", True, message)


@_needs("attention.strategy", "attention.unroll", "attention.ulysses_degree", "mesh.context")
def _unroll(values: Values) -> Iterator[Problem]:
    degree = values["attention.ulysses_degree"]
    if not values["attention.unroll"]:
        return
    if values["attention.strategy"] == "ulysses":
        message = "must be false: strategy ulysses has no steps; legal with attention.strategy ring or all_gather"
        yield Problem("attention.unroll", True, message)
    elif degree == values["mesh.context"] > 1:
        message = f"must be false: attention.ulysses_degree = {degree} = mesh.context leaves no ring"
        yield Problem("attention.unroll", True, message)


@_needs("model.num_heads", "model.num_kv_heads")
def _grouped_heads(values: Values) -> Iterator[Problem]:
    heads, kv_heads = values["model.num_heads"], values["model.num_kv_heads"]
    if heads % kv_heads:
        message = f"must divide model.num_heads = {heads}; legal: {_numbers(_divisors(heads))}"
        yield Problem("model.num_kv_heads", kv_heads, message)


@_needs("model.head_dim")
def _head_dim(values: Values) -> Iterator[Problem]:
    if values["model.head_dim"] % 2:
        message = f"must be even, since RoPE turns pairs: {_multiples(values['model.head_dim'], 2)}"
        yield Problem("model.head_dim", values["model.head_dim"], message)


@_needs("model.rope.scaling.low_freq_factor", "model.rope.scaling.high_freq_factor")
def _llama3_scaling(values: Values) -> Iterator[Problem]:
    low, high = values["model.rope.scaling.low_freq_factor"], values["model.rope.scaling.high_freq_factor"]
    if low >= high:
        yield Problem("model.rope.scaling.low_freq_factor", low, f"must be below high_freq_factor = {high}")


@_needs("model.rope.scaling.beta_fast", "model.rope.scaling.beta_slow")
def _yarn_scaling(values: Values) -> Iterator[Problem]:
    fast, slow = values["model.rope.scaling.beta_fast"], values["model.rope.scaling.beta_slow"]
    if slow >= fast:
        yield Problem("model.rope.scaling.beta_slow", slow, f"must be below beta_fast = {fast}")


@_needs("optimizer.warmup_steps", "run.steps")
def _warmup(values: Values) -> Iterator[Problem]:
    warmup, steps = values["optimizer.warmup_steps"], values["run.steps"]
    if warmup > steps:
        yield Problem("optimizer.warmup_steps", warmup, f"must be at most run.steps = {steps}")


@_needs("optimizer.decay", "optimizer.decay_fraction", "optimizer.warmup_steps", "run.steps")
def _wsd(values: Values) -> Iterator[Problem]:
    fraction, warmup, steps = (
        values["optimizer.decay_fraction"],
        values["optimizer.warmup_steps"],
        values["run.steps"],
    )
    if values["optimizer.decay"] == "wsd" and warmup <= steps < warmup + fraction * steps:
        message = (
            f"with decay wsd, the warm-up of {warmup} steps and the decay exceed run.steps = {steps}; "
            f"at most {(steps - warmup) / steps:.3g}"
        )
        yield Problem("optimizer.decay_fraction", fraction, message)


@_needs("metrics.profile", "run.steps")
def _profile(values: Values) -> Iterator[Problem]:
    profile, steps = values["metrics.profile"], values["run.steps"]
    if profile is not None and profile[1] > steps:
        yield Problem("metrics.profile", list(profile), f"its last step must be at most run.steps = {steps}")


@_needs("data.tokenizer", "model.vocab_size")
def _bytes_vocabulary(values: Values) -> Iterator[Problem]:
    if values["data.tokenizer"] == "bytes" and values["model.vocab_size"] < BYTES_VOCABULARY:
        message = (
            f"must be at least {BYTES_VOCABULARY} for data.tokenizer bytes: 256 bytes and 2 special tokens"
        )
        yield Problem("model.vocab_size", values["model.vocab_size"], message)


@_needs("data.tokenizer.vocab_size", "model.vocab_size")
def _trained_vocabulary(values: Values) -> Iterator[Problem]:
    trained, rows = values["data.tokenizer.vocab_size"], values["model.vocab_size"]
    if trained > rows:
        yield Problem("data.tokenizer.vocab_size", trained, f"must be at most model.vocab_size = {rows}")


@_needs("cluster.coordinator_address", "cluster.num_processes", "cluster.process_id")
def _cluster(values: Values) -> Iterator[Problem]:
    keys = ("cluster.coordinator_address", "cluster.num_processes", "cluster.process_id")
    missing = [key for key in keys if values[key] is None]
    for key in missing:
        if len(missing) < len(keys):
            yield Problem(key, None, f"{', '.join(keys)} must be set all three, or none")
    process, count = values["cluster.process_id"], values["cluster.num_processes"]
    if process is not None and count is not None and process >= count:
        yield Problem(
            "cluster.process_id", process, f"must be below cluster.num_processes = {count}: 0 to {count - 1}"
        )


@_needs("eval.every_steps", "data.eval_fraction")
def _held_out(values: Values) -> Iterator[Problem]:
    if values["eval.every_steps"] is not None and values["data.eval_fraction"] == 0:
        message = f"must be > 0 for eval.every_steps = {values['eval.every_steps']}: nothing is held out"
        yield Problem("data.eval_fraction", values["data.eval_fraction"], message)


@_needs("checkpoint.keep_best", "eval.every_steps")
def _best(values: Values) -> Iterator[Problem]:
    if values["checkpoint.keep_best"] and values["eval.every_steps"] is None:
        message = "which is best is told by eval.every_steps = None: never; legal: 0, or evaluations"
        yield Problem("checkpoint.keep_best", values["checkpoint.keep_best"], message)


@_needs("eval.every_steps", "eval.sequences", "mesh.data", "mesh.fsdp")
def _eval_sequences(values: Values) -> Iterator[Problem]:
    sequences, parts = values["eval.sequences"], _product(values, "mesh.data", "mesh.fsdp")
    if values["eval.every_steps"] is not None and sequences % parts:
        message = f"must be a multiple of mesh.data x mesh.fsdp = {parts}: {_multiples(sequences, parts)}"
        yield Problem("eval.sequences", sequences, message)


@_needs("data.sources.0.weight", "data.sources.1.weight")
def _weights(values: Values) -> Iterator[Problem]:
    weights = {key: value for key, value in values.items() if re.fullmatch(r"data\.sources\.\d+\.weight", key)}
    given = [key for key, value in weights.items() if value is not None]
    for key, value in weights.items():
        if given and value is None:
            yield Problem(key, None, f"{given[0]} is {weights[given[0]]}: give every source a weight, or none")


@_needs("data.packing", "data.documents_per_row")
def _documents_per_row(values: Values) -> Iterator[Problem]:
    packing, limit = values["data.packing"], values["data.documents_per_row"]
    if limit is not None and packing != "best_fit":
        has = "one document a row" if packing == "one" else "documents that run on from row to row, as they come"
        yield Problem("data.documents_per_row", limit, f"data.packing = {packing} has {has}: legal is null")


@_needs("data.length_shares.0.up_to")
def _length_shares(values: Values) -> Iterator[Problem]:
    found = {key: value for key, value in values.items() if re.fullmatch(r"data\.length_shares\.\d+\.up_to", key)}
    before = 0
    for place, (key, value) in enumerate(found.items()):
        if place == len(found) - 1:
            if value is not None:
                yield Problem(key, value, "must be null, as the last: for all that is longer")
        elif value is None or value <= before:
            yield Problem(key, value, f"must be a number above {before}: the lengths rise, and only the last is null")
        before = value or before
