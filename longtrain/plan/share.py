"""One device's share of a step: the local sizes that every formula of the plan is made of."""

from dataclasses import dataclass

from longtrain.config import Config, MeshConfig

BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32 = 4


@dataclass(frozen=True)
class Share:
    """What a device of `mesh` holds and computes of `config`'s step. `kernel` is the attention kernel that runs."""

    config: Config
    mesh: MeshConfig
    kernel: str

    @property
    def devices(self) -> int:
        return self.mesh.data * self.mesh.fsdp * self.mesh.context * self.mesh.tensor

    @property
    def parameter_shards(self) -> int:
        """Devices that parameters are cut over, besides tensor."""
        return self.mesh.fsdp * self.mesh.context

    @property
    def micro_batches(self) -> int:
        return self.config.batch.accumulation

    @property
    def layer_calls(self) -> int:
        """How often a step goes through a layer: every layer for every micro-batch."""
        return self.config.model.num_layers * self.micro_batches

    @property
    def ulysses_degree(self) -> int:
        """Neighbouring context shards that exchange heads for sequence."""
        attention = self.config.attention
        return self.mesh.context if attention.strategy == "ulysses" else attention.ulysses_degree

    @property
    def ring(self) -> int:
        """Members of the ring that keys and values go round: context shards, or groups of them; 1: there is none."""
        return 1 if self.config.attention.strategy == "all_gather" else self.mesh.context // self.ulysses_degree

    @property
    def rows(self) -> int:
        """Rows of a micro-batch that a device takes part in."""
        return self.config.batch.sequences // (self.mesh.data * self.mesh.fsdp * self.micro_batches)

    @property
    def length(self) -> int:
        """Tokens of a row that a device holds."""
        return self.config.sequence_length // self.mesh.context

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a device holds."""
        return self.rows * self.length

    @property
    def mlp_chunks(self) -> int:
        """Parts of a device's tokens that the MLP takes one after the other."""
        chunk = self.config.memory.mlp_chunk
        return 1 if chunk is None or chunk >= self.length else self.length // chunk

    @property
    def heads(self) -> int:
        return self.config.model.num_heads // self.mesh.tensor

    @property
    def kv_heads(self) -> int:
        """Key/value heads that a device attends with."""
        return max(self.config.model.num_kv_heads // self.mesh.tensor, 1)

    @property
    def kv_heads_held(self) -> int:
        """Key/value heads that a device projects to: all of them where there are fewer than tensor shards."""
        heads, tensor = self.config.model.num_kv_heads, self.mesh.tensor
        return heads // tensor if heads % tensor == 0 else heads

    @property
    def mlp(self) -> int:
        return self.config.model.mlp_dim // self.mesh.tensor

    @property
    def vocabulary(self) -> int:
        return self.config.model.vocab_size // self.mesh.tensor

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.config.model.compute_dtype]

    @property
    def parameter_bytes(self) -> int:
        return BYTES[self.config.model.param_dtype]

    @property
    def attention_weights(self) -> int:
        """Numbers in a layer's four attention matrices, as a device computes with them: gathered, cut over tensor."""
        model = self.config.model
        return 2 * model.embed_dim * model.head_dim * (self.heads + self.kv_heads_held)

    @property
    def mlp_weights(self) -> int:
        """The same of a layer's three MLP matrices."""
        return 3 * self.config.model.embed_dim * self.mlp

    @property
    def layer_weights(self) -> int:
        return self.attention_weights + self.mlp_weights

    @property
    def head_weights(self) -> int:
        """The same of the output head."""
        return self.config.model.embed_dim * self.vocabulary

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers that a device holds, the norms' among them."""
        model = self.config.model
        return model.num_layers * (self.layer_weights + 2 * model.embed_dim) // self.parameter_shards

    @property
    def parameters(self) -> int:
        """All parameters that a device holds."""
        tables = 1 if self.config.model.tie_embeddings else 2
        outside = tables * self.head_weights + self.config.model.embed_dim
        return self.layer_parameters + outside // self.parameter_shards
