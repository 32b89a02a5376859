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
        """Return the number of experts that `rows` tokens reach, if all are equally likely.

        Real routers prefer some experts, so fewer are reached and the largest takes longer.
        """
        if self.experts == 1:
            return 1.0
        missed = (1.0 - self.chosen / self.experts) ** rows
        return float(self.experts * (1.0 - missed))

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
    """

    experts: int
    chosen: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0

    @property
    def active_width(self) -> int:
        """Return the MLP width of one token."""
        return self.chosen * self.width + self.shared_width

    def products(self, hidden: int, gated: bool, weights: WeightFormat) -> tuple[Product, ...]:
        """Return router, experts and shared experts of one layer."""
        up = 2 if gated else 1
        routed = (
            Product(self.experts, hidden, 16),
            Product(up * self.width, hidden, weights.expert_bits, self.experts, self.chosen),
            Product(hidden, self.width, weights.expert_bits, self.experts, self.chosen),
        )
        if not self.shared_width:
            return routed
        return (
            *routed,
            Product(up * self.shared_width, hidden, weights.linear_bits),
            Product(hidden, self.shared_width, weights.linear_bits),
        )


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
