"""The matrix products of a layer: attention, dense MLP, experts, and how weights are stored.

A product is (rows x inputs) @ (inputs x outputs). `step_time` turns products into seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the matrices of the layers are stored. Embeddings, head and norms have 16 bits.

    Attributes:
        name: name for messages, such as `fp8`.
        attention_bits, linear_bits, expert_bits: bits of one weight, scales included.
        arithmetic: FLOP/s that products run at where the GPU has the units: bf16, fp8 or fp4.
            Elsewhere weights are unpacked and multiplied in 16 bits.
        block: least width of a part of a matrix that is divided among GPUs. 0: any.
    """

    name: str
    attention_bits: float
    linear_bits: float
    expert_bits: float
    arithmetic: str = "bf16"
    block: int = 0

    @property
    def least_bits(self) -> float:
        return min(self.attention_bits, self.linear_bits, self.expert_bits)


PLAIN = WeightFormat("bf16", 16, 16, 16)


EVENNESS = 3.0
"""How evenly routers choose: shape of the gamma distribution of the experts' popularity. Fitted to
NVIDIA's op tables (`moe`, `power_law_1.01`): 16 and 64 tokens reach 51 and 99 of gpt-oss' 128
experts, and of Kimi-K2.5's 384 114 and 253."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of every token, or of its experts' share of tokens.

    Attributes:
        bits: bits of one weight. 16 is multiplied in 16 bits, whichever the format's arithmetic.
        experts: matrices of this size of which each token takes `chosen`. 1: all take the same.
    """

    outputs: int
    inputs: int
    bits: float
    experts: int = 1
    chosen: int = 1

    def touched(self, rows: int) -> float:
        """Return the number of experts that `rows` tokens reach. Routers prefer some experts."""
        if self.experts == 1:
            return 1.0
        # Popularity is gamma distributed. The first token reaches as many as it chooses.
        others = self.chosen * (rows - 1) / self.experts
        missed = (1.0 + others / EVENNESS) ** -EVENNESS
        return float(self.chosen + (self.experts - self.chosen) * (1.0 - missed))

    @property
    def weights(self) -> int:
        """Return the weights of one matrix."""
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with equal products."""

    layers: int
    products: tuple[Product, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer.

    Attributes:
        experts, chosen: number of routed experts, and how many of them a token takes.
        width: MLP width of one expert.
        shared_width: MLP width of the experts that every token takes. 0: no such experts.
        dense_layers: layers without experts.
        latent: width of the hidden state inside the experts. 0: the model's.
        dense: width of a dense MLP next to the experts of each layer (Gemma 4). 0: no such MLP.
    """

    experts: int
    chosen: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0
    latent: int = 0
    dense: int = 0

    @property
    def active_width(self) -> int:
        """Return the MLP width of one token."""
        return self.chosen * self.width + self.shared_width + self.dense

    def products(self, hidden: int, gated: bool, weights: WeightFormat) -> tuple[Product, ...]:
        """Return router, experts and shared experts of one layer."""
        up, inner, bits = 2 if gated else 1, self.latent or hidden, weights.linear_bits
        routed = (
            Product(self.experts, hidden, 16),
            Product(up * self.width, inner, weights.expert_bits, self.experts, self.chosen),
            Product(inner, self.width, weights.expert_bits, self.experts, self.chosen),
        )
        around = (Product(inner, hidden, bits), Product(hidden, inner, bits)) if self.latent else ()
        widths = [width for width in (self.shared_width, self.dense) if width]
        mlps = (
            product
            for width in widths
            for product in (Product(up * width, hidden, bits), Product(hidden, width, bits))
        )
        return (*routed, *around, *mlps)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): one latent row for each token is cached.

    Attributes:
        query_rank: width of the compressed query. 0: not compressed.
        rank, rope: numbers of the cached row: compressed keys and values, and the rotated key.
        nope, value: numbers of one head's key without position, and of its value.
    """

    query_rank: int
    rank: int
    rope: int
    nope: int
    value: int

    @property
    def query_dim(self) -> int:
        return self.nope + self.rope

    def up_flops(self, heads: int) -> int:
        """Return the FLOPs that unpack one cached row into keys and values of all heads."""
        return 2 * self.rank * heads * (self.nope + self.value)

    def decode_flops(self, heads: int) -> int:
        """Return the FLOPs of one decoding query and one cached row: it is read as it is."""
        return 2 * heads * (2 * self.rank + self.rope)

    def products(self, heads: int, hidden: int, bits: float) -> tuple[Product, ...]:
        """Return the products of one layer's attention. Products into ranks are on every GPU."""
        queries = heads * self.query_dim
        first = (
            (Product(self.query_rank, hidden, bits), Product(queries, self.query_rank, bits))
            if self.query_rank
            else (Product(queries, hidden, bits),)
        )
        return (
            *first,
            Product(self.rank + self.rope, hidden, bits),
            Product(heads * (self.nope + self.value), self.rank, bits),
            Product(hidden, heads * self.value, bits),
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention that caches a key and a value of each KV head.

    Attributes:
        key, value: numbers of one head's key, and of its value.
        gated: queries have a gate of the same size (Qwen3.5).
        tied: keys are the values, too, but both are cached (Gemma 4).
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    gated: bool = False
    tied: bool = False

    def row(self, ranks: int) -> int:
        """Return the cached numbers of one token on one of `ranks` GPUs: one KV head at least."""
        return -(-self.kv_heads // ranks) * (self.key + self.value)

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of one pair of query and key."""
        return 2 * self.heads * (self.key + self.value)

    def products(self, hidden: int, bits: float) -> tuple[Product, ...]:
        """Return the products of one layer: queries, keys and values, and the output."""
        cached = self.kv_heads * (self.key if self.tied else self.key + self.value)
        queries = self.heads * self.key * (2 if self.gated else 1)
        return (
            Product(queries + cached, hidden, bits),
            Product(hidden, self.heads * self.value, bits),
        )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers that keep one state of a request in place of keys and values.

    Attributes:
        layers: number of these layers.
        inputs, inner: outputs of the first product of the hidden state, inputs of the last.
        taps: earlier tokens that the convolution keeps, 16 bits for each of its channels.
        channels, groups, group_channels: its channels that GPUs divide, its groups (each GPU has at
            least 1), and the channels of a group.
        numbers, width: numbers of the recurrent state, and bytes of each.
        exports: a chunk also leaves its state at the last block boundary inside it.
        first: the first layer of the model has such a state.
    """

    layers: int
    inputs: int
    inner: int
    taps: int
    channels: int
    numbers: int
    width: int = 4
    groups: int = 0
    group_channels: int = 0
    exports: bool = False
    first: bool = True

    def bytes(self, ranks: int) -> int:
        """Return the bytes of one request in one layer on one of `ranks` GPUs."""
        groups = self.groups if self.groups % ranks == 0 else ranks
        channels = (self.channels + groups * self.group_channels) // ranks
        return 2 * self.taps * channels + self.width * self.numbers // ranks

    def products(self, hidden: int, bits: float) -> tuple[Product, ...]:
        """Return the products of one layer."""
        return Product(self.inputs, hidden, bits), Product(hidden, self.inner, bits)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small keys of every token, by which sparse attention chooses the tokens it attends to.

    Attributes:
        layers: layers with an indexer. Others attend to the choice of the layer before.
        sparse: layers that attend to chosen tokens only, the first of the model excepted.
        heads, width: heads of an index query, numbers of an index key.
        row: bytes of one token's index key in the cache. 0: cached numbers of the cache's format.
        chosen: tokens that a query attends to.
        query_rank: width of the input of index queries.
        block: tokens of a KV block are a multiple of it.
    """

    layers: int
    sparse: int
    heads: int
    width: int
    row: int
    chosen: int
    query_rank: int
    block: int

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of one pair of index query and index key."""
        return 2 * self.heads * self.width

    def products(self, hidden: int, bits: float) -> tuple[Product, ...]:
        """Return the products of one layer: index queries, and index key with head weights."""
        return (
            Product(self.heads * self.width, self.query_rank, bits),
            Product(self.width + self.heads, hidden, 16),
        )


@dataclass(frozen=True, slots=True)
class Mixers:
    """The parts of a model's layers that combine tokens: attention and recurrent states.

    Attributes:
        layers, sliding: attention layers, and how many of them have a window.
        full, near: heads of layers with the whole context, and with a window.
        latent: used in place of these heads.
    """

    layers: int
    sliding: int
    full: Heads
    near: Heads
    latent: Latent | None = None
    state: Recurrent | None = None
    index: Indexer | None = None

    def groups(self, hidden: int, bits: float) -> tuple[LayerGroup, ...]:
        """Return the products of these parts, of `bits` a weight."""
        if self.latent is not None:
            products = self.latent.products(self.full.heads, hidden, bits)
            groups = [LayerGroup(self.layers, products)]
        else:
            groups = [
                LayerGroup(self.layers - self.sliding, self.full.products(hidden, bits)),
                LayerGroup(self.sliding, self.near.products(hidden, bits)),
            ]
        others = (part for part in (self.state, self.index) if part is not None)
        groups += [LayerGroup(part.layers, part.products(hidden, bits)) for part in others]
        return tuple(group for group in groups if group.layers)

    @property
    def count(self) -> int:
        """Return the number of layers."""
        return self.layers + (self.state.layers if self.state is not None else 0)
