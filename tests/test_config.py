"""The config: what is read as what, what lies above what, and what is refused with which words."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

import tiny
from longtrain import config
from longtrain.config import reading
from longtrain.config.validation import declared_keys
from longtrain.errors import ConfigError, Problem

CHECKOUT = Path(__file__).parent.parent
CONFIGS = sorted(CHECKOUT.glob("configs/**/*.yaml"))


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a whole config."""
    return write(tmp_path, config.to_yaml(tiny.config()))


def refused(*overrides: str, tree: dict[str, Any] | None = None) -> dict[str, Problem]:
    """The problems, by key, of the tiny config (or another) with overrides."""
    with pytest.raises(ConfigError) as caught:
        config.from_mapping(tiny.TREE if tree is None else tree, overrides)
    assert caught.value.exit_code == 2
    return {problem.key: problem for problem in caught.value.problems}


# --- Reading ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2e-5", 2e-5),
        ("1e4", 1e4),
        ("5E-1", 0.5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5", -0.5),
        ("+3", 3),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("010", 10),
        ("0", 0),
        ("null", None),
        ("None", None),
        ("~", None),
        ("true", True),
        ("False", False),
        ("[1, 2e1, x]", [1, 20.0, "x"]),
        ("{a: 1e-4}", {"a": 1e-4}),
        ("{on: 1, 2: 3}", {"on": 1, "2": 3}),
        # These stay text, for the key's type to refuse by name.
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("none", "none"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("1_", "1_"),
        ("_1", "_1"),
        ("e4", "e4"),
        ("1e", "1e"),
        (".", "."),
        ("-", [None]),
        ("nan", "nan"),
        (".inf", ".inf"),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
    ],
)
def test_a_word_is_read_as_a_person_means_it(text: str, value: object):
    read = reading.parse(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("number", ["1e4", "1_0000", "10000", "10000.0", "010000"])
def test_a_whole_number_may_be_spelled_in_any_way(number: str, file: Path):
    steps = config.load(file, [f"run.steps={number}"]).run.steps
    assert steps == 10000
    assert type(steps) is int


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "x: {a: 1, a: 2}",
        "[a: b",
        "a: b: c",
        "? [1]\n: 2",
        "a: &a {b: *a}",
        "!!python/name:os.system",
    ],
)
def test_what_is_not_plain_yaml_is_refused(text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a YAML file that can be read"):
        config.load(write(tmp_path, text))


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'steps' is there twice, line 3"):
        config.load(write(tmp_path, "run:\n  steps: 1\n  steps: 2\n"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    for path in (tmp_path / "nowhere.yaml", tmp_path, write(tmp_path, "- a\n- b")):
        with pytest.raises(ConfigError) as caught:
            config.load(path)
        assert str(path) in str(caught.value)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError):
        config.load(tmp_path / "bytes.yaml")


def test_an_empty_file_lacks_every_required_key(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, ""))
    required = [key for key, field in declared_keys() if field.is_required() and ".0." not in key]
    required = [key for key in required if not key.startswith(("model.rope.", "data.tokenizer."))]
    assert [problem.key for problem in caught.value.problems] == required
    assert "run.steps = (not set): required: a whole number >= 1" in str(caught.value)


# --- Layers ---


def test_a_file_extends_others_key_by_key_and_lists_are_replaced(tmp_path: Path):
    write(tmp_path, config.to_yaml(tiny.config("data.sources=[{path: a}, {path: b}]")), "base.yaml")
    write(tmp_path, "run: {steps: 7}\noptimizer: {beta1: .8, beta2: .8}\n", "other.yaml")
    (tmp_path / "deeper").mkdir()
    path = write(
        tmp_path,
        "extends: [../base.yaml, ../other.yaml]\noptimizer: {beta2: .7}\ndata: {sources: [{path: c}]}\n",
        "deeper/run.yaml",
    )
    loaded, origins = config.load_with_origins(path, ["optimizer.eps=1e-6"])
    assert loaded.run.steps == 7
    assert (loaded.optimizer.beta1, loaded.optimizer.beta2, loaded.optimizer.eps) == (0.8, 0.7, 1e-6)
    assert [source.path for source in loaded.data.sources] == ["c"]
    assert origins["optimizer.beta1"].endswith("other.yaml")
    assert origins["optimizer.beta2"] == str(path)
    assert origins["optimizer.eps"] == "override"
    assert origins["data.sources.0.path"] == str(path)
    assert origins["data.sources.0.weight"] == "default"
    assert origins["run.name"].endswith("base.yaml")


@pytest.mark.parametrize("extends", ["run.yaml", "[other.yaml]"])
def test_files_that_extend_each_other_are_refused(extends: str, tmp_path: Path):
    write(tmp_path, "extends: run.yaml", "other.yaml")
    with pytest.raises(ConfigError, match="extends itself: .*run.yaml -> .*run.yaml"):
        config.load(write(tmp_path, f"extends: {extends}"))


def test_the_same_base_twice_is_no_circle(file: Path, tmp_path: Path):
    write(tmp_path, "extends: run.yaml\nrun: {seed: 1}", "a.yaml")
    write(tmp_path, "extends: run.yaml\nrun: {name: b}", "b.yaml")
    assert config.load(write(tmp_path, "extends: [a.yaml, b.yaml]", "c.yaml")).run.name == "b"


@pytest.mark.parametrize("extends", ["nowhere.yaml", "3", "{a: b}", "[1]"])
def test_what_cannot_be_extended_is_refused(extends: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="extends = "):
        config.load(write(tmp_path, f"extends: {extends}"))


def test_a_preset_lies_beneath_the_models_own_keys():
    tree = copy.deepcopy(tiny.TREE)
    tree["model"] = {
        "preset": "llama3.1_8b",
        "num_layers": 2,
        "rope": {"theta": 1e7, "scaling": {"factor": 16}},
    }
    model = config.from_mapping(tree).model
    assert (model.num_layers, model.num_heads, model.rope.theta) == (2, 32, 1e7)
    assert model.rope.scaling == config.Llama3Scaling(
        type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    # Another type of scaling is another thing: nothing of the preset's is left in it.
    tree["model"]["rope"]["scaling"] = {"type": "linear", "factor": 4}
    assert config.from_mapping(tree).model.rope.scaling == config.LinearScaling(type="linear", factor=4.0)
    tree["model"]["rope"]["scaling"] = None
    assert config.from_mapping(tree).model.rope.scaling is None


def test_a_preset_may_be_chosen_by_an_override(file: Path):
    tree = copy.deepcopy(tiny.TREE) | {"model": {"num_layers": 3}}
    chosen = config.from_mapping(tree, ["model.preset=llama3.2_1b"]).model
    assert (chosen.num_layers, chosen.embed_dim, chosen.tie_embeddings) == (3, 2048, True)
    _, origins = config.load_with_origins(CHECKOUT / "configs/quickstart.yaml")
    assert origins["model.embed_dim"] == "preset quickstart"


@pytest.mark.parametrize("preset", reading.preset_names())
def test_every_preset_is_a_whole_model(preset: str):
    tree = tiny.TREE | {"model": {"preset": preset}}
    assert config.from_mapping(tree).model.preset == preset


def test_overrides_reach_every_depth_and_the_last_wins(file: Path):
    loaded = config.load(
        file,
        [
            "data.sources=[{path: a, weight: 2}, {path: b}]",
            "data.sources.1.weight=.5",
            "communication.xla_flags=[--a=1, --b=2]",
            "communication.xla_flags.0=--c=3",
            "metrics.profile=[5, 1e1]",
            "data.tokenizer={train: sentencepiece, vocab_size: 300}",
            "data.tokenizer.vocab_size=400",
            "model.rope.scaling.type=linear",
            "model.rope.scaling.factor=2",
            "run.name=x=y",
            "optimizer.clip_norm=null",
            "run.steps=10",
            "run.steps=20",
        ],
    )
    assert [(source.path, source.weight) for source in loaded.data.sources] == [("a", 2.0), ("b", 0.5)]
    assert loaded.communication.xla_flags == ("--c=3", "--b=2")
    assert loaded.metrics.profile == (5, 10)
    assert loaded.data.tokenizer == config.TokenizerTraining(train="sentencepiece", vocab_size=400)
    assert loaded.model.rope.scaling == config.LinearScaling(type="linear", factor=2.0)
    assert (loaded.run.name, loaded.run.steps, loaded.optimizer.clip_norm) == ("x=y", 20, None)


# --- Refusals: one message each, with the key, the value and what is legal ---

REFUSALS = [
    # override, key, words of the message
    ("mesh.contxt=2", "mesh.contxt", "unknown key; the nearest is mesh.context"),
    ("learning_rate=1", "learning_rate", "unknown key; the nearest is optimizer.learning_rate"),
    ("optimiser.learning_rate=1", "optimiser", "unknown key; the nearest is optimizer"),
    ("xyz=1", "xyz", "unknown key; the nearest is "),
    ("data.sources.0.wieght=1", "data.sources.0.wieght", "the nearest is data.sources.0.weight"),
    (
        "model.rope.scaling={type: linear, facter: 2, factor: 2}",
        "model.rope.scaling.facter",
        "model.rope.scaling.factor",
    ),
    ("model.rope.scaling={type: ntk}", "model.rope.scaling.type", "must be one of linear, llama3, yarn"),
    ("model.rope.scaling={factor: 2}", "model.rope.scaling.type", "must be one of linear, llama3, yarn"),
    ("model.rope.scaling=3", "model.rope.scaling", "must be a mapping of type, factor"),
    ("run.steps=0", "run.steps", "must be a whole number >= 1"),
    ("run.steps=1.5", "run.steps", "must be a whole number >= 1"),
    ("run.steps=1e999", "run.steps", "must be a whole number >= 1"),
    ("run.steps=true", "run.steps", "must be a whole number >= 1"),
    ("run.steps='4'", "run.steps", "must be a whole number >= 1"),
    ("run.steps=null", "run.steps", "must be a whole number >= 1"),
    ("run.steps=[1]", "run.steps", "must be a whole number >= 1"),
    ("run.steps.x=1", "run.steps.x", "has no key 'x' to set: its parent is 4"),
    ("run.seed=-1", "run.seed", "must be a whole number >= 0"),
    ("run.name=a/b", "run.name", "must be one folder name"),
    ("run.name=..", "run.name", "must be one folder name"),
    ("run.name=''", "run.name", "must be one folder name"),
    ("run.name=4", "run.name", "must be one folder name"),
    ("run.name=2024", "run.name", "so quote it, e.g. run.name='\"2024\"' (in a file: \"2024\")"),
    ("run.name=true", "run.name", "unquoted it is a boolean, so quote it, e.g. run.name='\"true\"'"),
    ("data.sources.0.path=7", "data.sources.0.path", "e.g. data.sources.0.path='\"7\"'"),
    ("run.output_dir=''", "run.output_dir", "must be text, not empty"),
    ("run=3", "run", "must be a mapping of name, output_dir, seed, steps"),
    ("mesh=null", "mesh", "must be a mapping of data, fsdp, context, tensor, simulate_devices"),
    ("model.preset=lama", "model.preset", "no such preset; legal: llama3.1_8b, "),
    ("model.compute_dtype=float16", "model.compute_dtype", "must be one of float32, bfloat16"),
    ("model.tie_embeddings=no", "model.tie_embeddings", "must be true or false"),
    ("model.tie_embeddings=1", "model.tie_embeddings", "must be true or false"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate", "must be a number > 0"),
    ("optimizer.learning_rate=1e999", "optimizer.learning_rate", "must be a number > 0"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate", "must be a number > 0"),
    ("optimizer.learning_rate=false", "optimizer.learning_rate", "must be a number > 0"),
    ("optimizer.beta1=1", "optimizer.beta1", "must be a number >= 0 and < 1"),
    ("optimizer.min_ratio=1.1", "optimizer.min_ratio", "must be a number >= 0 and <= 1"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm", "must be a number > 0, or null"),
    ("optimizer.warmup_steps=5", "optimizer.warmup_steps", "must be at most run.steps = 4"),
    ("data.eval_fraction=1", "data.eval_fraction", "must be a number >= 0 and < 1"),
    ("data.sources=[]", "data.sources", "must not be empty"),
    ("data.sources=a.txt", "data.sources", "must be a list, each a mapping of path, weight, text_field"),
    ("data.sources=[a.txt]", "data.sources.0", "must be a mapping of path, weight, text_field"),
    ("data.sources.1.path=b", "data.sources.1.path", "'1' is no place in a list of 1; legal places: 0 to 0"),
    ("data.sources.0.weight=0", "data.sources.0.weight", "must be a number > 0"),
    ("data.sources=[{path: a}, {path: b, weight: 2}]", "data.sources.0.weight", "give every source a weight, or none"),
    ("data.length_shares=[{up_to: 9, share: 1}]", "data.length_shares.0.up_to", "must be null, as the last"),
    (
        "data.length_shares=[{up_to: 9, share: 1}, {up_to: 9, share: 1}, {up_to: null, share: 1}]",
        "data.length_shares.1.up_to",
        "must be a number above 9: the lengths rise",
    ),
    (
        "data.length_shares=[{up_to: null, share: 1}, {up_to: null, share: 1}]",
        "data.length_shares.0.up_to",
        "must be a number above 0",
    ),
    ("data.length_shares=[{up_to: null, share: 0}]", "data.length_shares.0.share", "must be a number > 0"),
    ("data.length_shares=[{share: 1}]", "data.length_shares.0.up_to", "required"),
    ("data.on_change=ignore", "data.on_change", "must be one of refuse, restart, continue"),
    ("data.on_bad_record=ignore", "data.on_bad_record", "must be one of refuse, skip"),
    ("data.tokenizer=4", "data.tokenizer", "must be bytes, the path of a SentencePiece .model or of a Hugging"),
    ("data.tokenizer={train: bpe, vocab_size: 300}", "data.tokenizer.train", "must be sentencepiece"),
    ("data.tokenizer={train: sentencepiece}", "data.tokenizer.vocab_size", "required: a whole number > 256"),
    (
        "data.tokenizer={train: sentencepiece, vocab_size: 600}",
        "data.tokenizer.vocab_size",
        "must be at most model.vocab_size = 512",
    ),
    ("model.vocab_size=200", "model.vocab_size", "must be at least 258 for data.tokenizer bytes"),
    ("attention.strategy=Ring", "attention.strategy", "must be one of ring, all_gather, ulysses"),
    (
        "checkpoint.restore=newest",
        "checkpoint.restore",
        "must be one of latest, none, or a whole number >= 1",
    ),
    ("metrics.profile=[3, 2]", "metrics.profile", "must be [first, last], two steps >= 1 in ascending order"),
    ("metrics.profile=[0, 2]", "metrics.profile", "must be [first, last]"),
    ("metrics.profile=[1, 2, 3]", "metrics.profile", "must be [first, last]"),
    ("metrics.profile=[4, 5]", "metrics.profile", "its last step must be at most run.steps = 4"),
    ("communication.xla_flags=--a", "communication.xla_flags", "must be a list, each an XLA flag"),
    ("communication.xla_flags=[a]", "communication.xla_flags", "must be a list, each an XLA flag"),
    ("cluster.num_processes=2", "cluster.process_id", "must be set all three, or none"),
    (
        "cluster.coordinator_address=localhost",
        "cluster.coordinator_address",
        "must be text of the form host:port",
    ),
    (
        "cluster={coordinator_address: 'a:1', num_processes: 2, process_id: 2}",
        "cluster.process_id",
        "must be below cluster.num_processes = 2: 0 to 1",
    ),
    (
        "memory.mlp_chunk=24",
        "memory.mlp_chunk",
        "must divide a device's part of the sequence, sequence_length / mesh.context = 64: 16 or 32; or null",
    ),
    ("eval.every_steps=2", "data.eval_fraction", "must be > 0 for eval.every_steps = 2"),
    (
        "batch.accumulation=3",
        "batch.sequences",
        "must be a multiple of mesh.data x mesh.fsdp x batch.accumulation = 3",
    ),
    ("mesh.data=3", "batch.sequences", "= 3: 3 or 6"),
    ("mesh.context=3", "sequence_length", "must be a multiple of mesh.context = 3: 63 or 66"),
    ("mesh.tensor=3", "mesh.tensor", "must divide model.num_heads = 4"),
    ("mesh.tensor=3", "mesh.tensor", "legal: 1, 2, 4"),
    ("mesh.fsdp=128", "model.embed_dim", "must be a multiple of mesh.fsdp x mesh.context = 128"),
    ("mesh.context=0", "mesh.context", "must be a whole number >= 1, or -1 for all devices that are left"),
    ("mesh.context=-2", "mesh.context", "must be a whole number >= 1, or -1 for all devices that are left"),
    ("mesh.simulate_devices=4", "mesh.simulate_devices", "must be the mesh's product, 1, or auto"),
    ("mesh.simulate_devices=many", "mesh.simulate_devices", "must be auto, or a whole number >= 1, or null"),
    ("model.num_kv_heads=3", "model.num_kv_heads", "must divide model.num_heads = 4; legal: 1, 2, 4"),
    ("model.head_dim=15", "model.head_dim", "must be even, since RoPE turns pairs: 14 or 16"),
    ("mesh.context", "override", "must be dotted.key=value"),
    ("=4", "override", "must be dotted.key=value"),
    ("mesh..context=4", "override", "must be dotted.key=value"),
    ("optimizer.clip_norm=", "optimizer.clip_norm", "the override has no value"),
    ("run.steps=[", "run.steps", "cannot be read as YAML"),
    ("data.sources.0.path=*.txt", "data.sources.0.path", "cannot be read as YAML (quote it?)"),
    ("extends=a.yaml", "extends", "only a file can extend another"),
]


@pytest.mark.parametrize(("override", "key", "words"), REFUSALS)
def test_a_bad_value_is_refused_by_key_with_what_is_legal(override: str, key: str, words: str):
    assert words in refused(override)[key].message


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            ["attention.layout=zigzag", "mesh.context=4", "sequence_length=60"],
            "sequence_length",
            "must be a multiple of 2 x mesh.context (zigzag) = 8: 56 or 64",
        ),
        (
            ["attention.strategy=ulysses", "mesh.context=8"],
            "mesh.context",
            "must divide the key/value heads of a device, 2 (model.num_kv_heads = 2 over mesh.tensor = 1); "
            "legal: 1, 2, or attention.strategy ring or all_gather",
        ),
        (
            ["attention.ulysses_degree=4", "mesh.context=4"],
            "attention.ulysses_degree",
            "must divide mesh.context = 4 and the key/value heads of a device, 2 (model.num_kv_heads = 2 over "
            "mesh.tensor = 1); legal: 1, 2",
        ),
        (["attention.ulysses_degree=2"], "attention.ulysses_degree", "must divide mesh.context = 1 and"),
        (
            ["attention.ulysses_degree=4", "mesh.context=-1"],  # one of these that divides it
            "attention.ulysses_degree",
            "legal: 1, 2",
        ),
        (
            ["attention.ulysses_degree=2", "mesh.context=2", "attention.strategy=all_gather"],
            "attention.ulysses_degree",
            "must be 1: attention.strategy all_gather has no ring",
        ),
        (
            ["attention.two_way=true", "mesh.context=2", "attention.strategy=ulysses"],
            "attention.two_way",
            "must be false: strategy ulysses has no ring",
        ),
        (
            ["attention.two_way=true", "mesh.context=2", "attention.ulysses_degree=2"],
            "attention.two_way",
            "must be false: attention.ulysses_degree = 2 = mesh.context leaves no ring",
        ),
        (
            ["attention.unroll=true", "mesh.context=2", "attention.ulysses_degree=2"],
            "attention.unroll",
            "must be false: attention.ulysses_degree = 2 = mesh.context leaves no ring",
        ),
        (
            ["attention.two_way=true", "mesh.context=4", "attention.ulysses_degree=2"],
            "attention.two_way",
            "over attention.ulysses_degree = 2 are not an even number",
        ),
        (["memory.offload=attention", "memory.remat=none"], "memory.offload", "must be none with memory.remat none"),
        (
            ["memory.offload=attention", "mesh.simulate_devices=auto"],
            "memory.offload",
            "must be none: simulated devices are the CPU's",
        ),
        (["attention.unroll=true", "attention.strategy=ulysses"], "attention.unroll", "strategy ulysses has no steps"),
        (
            ["optimizer.decay=wsd", "optimizer.decay_fraction=0.5", "optimizer.warmup_steps=3"],
            "optimizer.decay_fraction",
            "at most 0.25",
        ),
        (
            ["memory.mlp_chunk=12", "mesh.context=4"],
            "memory.mlp_chunk",
            "sequence_length / mesh.context = 16: 8 or 16; or null",
        ),
        (
            ["eval.every_steps=2", "data.eval_fraction=0.5", "eval.sequences=3", "mesh.data=2", "mesh.fsdp=2"],
            "eval.sequences",
            "must be a multiple of mesh.data x mesh.fsdp = 4: 4",
        ),
        (["mesh.data=-1", "mesh.context=-1"], "mesh.context", "only one axis may be -1"),
        (
            ["mesh.data=-1", "mesh.simulate_devices=auto"],
            "mesh.simulate_devices",
            "unknown while an axis is -1",
        ),
        (["mesh.data=-1", "mesh.context=2", "mesh.simulate_devices=3"], "mesh.simulate_devices", "2: 2 or 4"),
        (
            [
                "model.rope.scaling={type: llama3, factor: 2, original_length: 8, "
                "low_freq_factor: 4, high_freq_factor: 4}"
            ],
            "model.rope.scaling.low_freq_factor",
            "must be below high_freq_factor = 4",
        ),
        (
            ["model.rope.scaling={type: yarn, factor: 2, original_length: 8, beta_slow: 64}"],
            "model.rope.scaling.beta_slow",
            "must be below beta_fast = 32",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides: list[str], key: str, words: str):
    assert words in refused(*overrides)[key].message


@pytest.mark.parametrize(
    "overrides",
    [
        ["memory.mlp_chunk=16", "mesh.context=4"],  # a device's whole part
        ["memory.mlp_chunk=24", "mesh.context=4"],  # more than that is the whole, too
        ["memory.mlp_chunk=24", "mesh.context=-1"],  # nobody knows yet
        ["attention.ulysses_degree=2", "mesh.context=-1"],
        ["attention.ulysses_degree=2", "mesh.context=4", "attention.layout=zigzag", "sequence_length=60"],
        ["attention.two_way=true", "model.num_kv_heads=1"],  # one shard: nothing travels
        ["metrics.profile=[4, 4]"],
        ["eval.sequences=3", "mesh.data=4"],  # no evaluation is asked for
        ["eval.sequences=8", "mesh.data=4", "eval.every_steps=2", "data.eval_fraction=0.5"],
    ],
)
def test_keys_that_just_go_together_are_accepted(overrides: list[str]):
    tiny.config(*overrides)


def test_a_number_is_not_to_be_quoted_where_no_text_would_do():
    for override in ("run.steps=1.5", "attention.strategy=4", "run.name=-4", "checkpoint.restore=0"):
        (problem,) = refused(override).values()
        assert "quote" not in problem.message
    assert tiny.config('run.name="2024"').run.name == "2024"


def test_one_bad_mesh_axis_names_the_values_that_serve_all_its_reasons():
    tree = tiny.TREE | {"model": {"preset": "llama3_8b"}}
    message = refused("mesh.tensor=3", tree=tree)["mesh.tensor"].message
    assert "model.num_heads = 32" in message and "model.mlp_dim = 14336" in message
    assert "legal: 1, 2, 4, 8, 16, 32 " in f"{message} "


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_fewer_kv_heads_than_tensor_shards_are_allowed_where_they_divide(tensor: int):
    assert tiny.config(f"mesh.tensor={tensor}").mesh.tensor == tensor


def test_every_problem_is_said_at_once():
    """Unknown keys, types, missing keys, overrides and checks between keys; none hides another."""
    tree = copy.deepcopy(tiny.TREE)
    del tree["run"]["steps"]
    tree["attention"] = {"kernl": "xla"}
    tree["mesh"] = {"context": 3, "fsdp": "four"}
    problems = refused("optimizer.beta1=2", "data.sources.9.path=x", "cluster.process_id=0", tree=tree)
    assert set(problems) == {
        "run.steps",
        "attention.kernl",
        "mesh.fsdp",
        "sequence_length",
        "optimizer.beta1",
        "data.sources.9.path",
        "cluster.coordinator_address",
        "cluster.num_processes",
    }
    assert problems["mesh.fsdp"].value == "four"


def test_an_unknown_preset_is_one_problem_not_eight():
    assert list(refused(tree=tiny.TREE | {"model": {"preset": "llama9"}})) == ["model.preset"]


def test_a_missing_size_says_where_it_may_come_from():
    message = refused(tree=tiny.TREE | {"model": {}})["model.embed_dim"].message
    assert message.startswith("required: a whole number >= 1, here or by model.preset (llama3.1_8b, ")


def test_a_problem_says_which_file_or_override_it_is_from(file: Path, tmp_path: Path):
    write(tmp_path, "extends: run.yaml\nrun: {seed: x}", "middle.yaml")
    path = write(tmp_path, "extends: middle.yaml\nmesh: {tensor: x}", "top.yaml")
    with pytest.raises(ConfigError) as caught:
        config.load(path, ["batch.sequences=x"])
    messages = {problem.key: problem.message for problem in caught.value.problems}
    assert messages["run.seed"].endswith(f"(from {tmp_path / 'middle.yaml'})")
    assert messages["batch.sequences"].endswith("(given as an override)")
    assert "(" not in messages["mesh.tensor"]
    assert str(caught.value).startswith(f"{path} is refused (3 problems):\n")


# --- The mesh ---


def test_a_free_axis_takes_the_devices_that_are_left():
    loaded = tiny.config("mesh.context=-1", "mesh.fsdp=2")
    assert loaded.mesh.size is None
    mesh = config.resolve_mesh(loaded, 8)
    assert (mesh.axes, mesh.size) == ({"data": 1, "fsdp": 2, "context": 4, "tensor": 1}, 8)
    assert config.resolve_mesh(tiny.config("mesh.context=4"), 4).size == 4


@pytest.mark.parametrize(
    ("overrides", "devices", "words"),
    [
        (["mesh.context=4"], 8, "takes 4 devices, there are 8: the product of the axes must be 8"),
        (["mesh.context=4"], 2, "takes 4 devices, there are 2"),
        (["mesh.context=-1", "mesh.data=4"], 6, "a multiple of 4 devices; there are 6"),
        (["mesh.data=-1"], 8, r"batch.sequences = 4: must be a multiple of .* = 8: 8"),
        (["mesh.context=-1", "memory.mlp_chunk=12"], 4, "memory.mlp_chunk = 12: must divide .* = 16: 8 or 16"),
        (["mesh.tensor=-1"], 8, "mesh.tensor = 8: must divide model.num_heads = 4"),
        (["mesh.context=-1"], 6, "sequence_length = 64: must be a multiple of mesh.context = 6: 60 or 66"),
    ],
)
def test_a_mesh_that_does_not_take_the_devices_is_refused(overrides: list[str], devices: int, words: str):
    with pytest.raises(ConfigError, match=words):
        config.resolve_mesh(tiny.config(*overrides), devices)


def test_with_a_free_axis_the_others_are_checked_at_once():
    assert (
        "must be a multiple of mesh.context = 3"
        in refused("mesh.context=3", "mesh.data=-1")["sequence_length"].message
    )


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            ["mesh.context=-1", "mesh.simulate_devices=4", "sequence_length=127"],
            "sequence_length",
            "mesh.context = 4: 124 or 128 (mesh.context is -1: 4 on mesh.simulate_devices = 4)",
        ),
        (
            ["mesh.fsdp=-1", "mesh.simulate_devices=8"],
            "batch.sequences",
            "= 8: 8 (mesh.fsdp is -1: 8 on mesh.simulate_devices = 8)",
        ),
        (["mesh.tensor=-1", "mesh.context=2", "mesh.simulate_devices=16"], "mesh.tensor", "1, 2, 4 (mesh.tensor"),
        (["mesh.context=-1", "mesh.simulate_devices=4", "memory.mlp_chunk=12"], "memory.mlp_chunk", "= 16: 8 or 16"),
        (["mesh.context=-1", "mesh.fsdp=4", "mesh.simulate_devices=6"], "mesh.simulate_devices", "4: 4 or 8"),
    ],
)
def test_a_free_axis_of_counted_simulated_devices_is_checked_when_loaded(
    overrides: list[str], key: str, words: str
):
    problems = refused(*overrides)
    assert list(problems) == [key]
    assert words in problems[key].message


def test_a_free_axis_of_simulated_devices_stays_free_in_the_config():
    loaded = tiny.config("mesh.context=-1", "mesh.simulate_devices=4")
    assert loaded.mesh.context == -1
    assert config.resolve_mesh(loaded, 4).context == 4


def test_only_what_names_the_free_axis_tells_its_size():
    problems = refused("mesh.context=-1", "mesh.simulate_devices=4", "sequence_length=127", "model.head_dim=15")
    assert "is -1" in problems["sequence_length"].message
    assert "is -1" not in problems["model.head_dim"].message


# --- Writing ---


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.name='1e4'", "run.output_dir='null'", "data.sources.0.text_field='a: b # c'"],
        [
            "run.output_dir='a\"b\\c'",
            'data.sources.0.path="x\\ny\\tz"',
            "data.sources.0.text_field='Größe ☃'",
        ],
        ["run.output_dir=' '", "data.tokenizer='- x'", "run.name=no", "data.sources.0.text_field='*'"],
        ["optimizer.learning_rate=1e-30", "optimizer.eps=1.5e300", "optimizer.beta1=0"],
        [
            "data.sources=[{path: a, weight: 3}, {path: b, weight: 1}]",
            "metrics.profile=[1,2]",
            "optimizer.clip_norm=null",
        ],
        [
            "data.tokenizer={train: sentencepiece, vocab_size: 300}",
            "communication.xla_flags=['--a=b,c', '--d=[]']",
        ],
        ["model.rope.scaling={type: yarn, factor: 4, original_length: 32}", "checkpoint.restore=12"],
        ["model.rope.scaling={type: linear, factor: 4}", "mesh.context=-1", "checkpoint.restore=none"],
    ],
)
def test_a_config_that_is_written_reads_back_the_same(overrides: list[str], tmp_path: Path):
    original = tiny.config(*overrides)
    assert config.load(write(tmp_path, config.to_yaml(original))) == original
    assert config.from_mapping(original.model_dump()) == original


def test_show_is_yaml_that_reads_back_with_or_without_origins(file: Path, tmp_path: Path):
    overrides = ["data.sources=[{path: a}, {path: b}]", "run.steps=9"]
    for origins in (False, True):
        shown = config.show(file, overrides, origins=origins)
        assert config.load(write(tmp_path, shown, "shown.yaml")) == config.load(file, overrides)
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in shown.splitlines()}
    assert lines["steps: 9"] == "override"
    assert lines["- path: a"] == "override"
    assert lines["vocab_size: 512"] == str(file)


def test_overrides_upon_a_config_are_checked_again():
    base = tiny.config()
    assert config.with_overrides(base, "data.sources.0.weight=.5").data.sources[0].weight == 0.5
    with pytest.raises(ConfigError, match="sequence_length = 64"):
        config.with_overrides(base, "mesh.context=3")
    assert base == tiny.config()


def test_a_config_cannot_be_changed():
    loaded = tiny.config()
    with pytest.raises(pydantic.ValidationError):
        loaded.run.steps = 5  # type: ignore[misc]
    assert isinstance(loaded.data.sources, tuple)
    assert hash(loaded) == hash(tiny.config())


def test_run_dir_is_the_named_folder():
    assert tiny.config("run.output_dir=a/b", "run.name=c").run_dir == Path("a/b/c")


# --- The declarations, and what ships ---


def test_a_limit_on_documents_is_for_rows_that_can_have_one():
    assert tiny.config("data.documents_per_row=8").data.documents_per_row == 8
    for packing in ("concat", "one"):
        with pytest.raises(ConfigError, match=rf"data.documents_per_row = 8: data.packing = {packing} has"):
            tiny.config("data.documents_per_row=8", f"data.packing={packing}")


def test_length_shares_are_read():
    config_ = tiny.config("data.length_shares=[{up_to: 8192, share: 1}, {up_to: null, share: 2.5}]")
    assert [(it.up_to, it.share) for it in config_.data.length_shares] == [(8192, 1.0), (None, 2.5)]
    assert tiny.config("data.length_shares=[]").data.length_shares == ()


def test_every_key_is_documented_and_there_are_not_too_many():
    keys = dict(declared_keys())
    assert all(field.description and field.description.endswith(".") for field in keys.values())
    # 79 when the trainer was whole; each key since was asked for by name, for what no other key could say.
    assert 50 <= len([key for key in keys if not key.startswith("model.rope.scaling.")]) <= 92


def test_the_json_schema_names_every_section_and_describes_its_keys():
    schema = config.json_schema()
    assert set(schema["properties"]) == set(config.Config.model_fields)
    assert "resolved" in schema["title"] and "no `extends`" in schema["description"]
    warmup = schema["$defs"]["OptimizerConfig"]["properties"]["warmup_steps"]
    assert (
        warmup["type"] == "integer" and warmup["minimum"] == 0 and "rises linearly" in warmup["description"]
    )


def test_the_reference_page_is_current():
    page = (CHECKOUT / "docs/config.md").read_text(encoding="utf-8")
    script = CHECKOUT / "scripts/write_config_reference.py"
    fresh = subprocess.run([sys.executable, script, "-"], capture_output=True, text=True, check=True).stdout
    assert page == fresh, "run scripts/write_config_reference.py"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_ships_loads(path: Path):
    assert config.load(path).run.name == path.stem


def test_loading_a_config_loads_no_jax():
    code = (
        "import sys; from longtrain import config; config.load('configs/quickstart.yaml'); "
        "sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=True)
