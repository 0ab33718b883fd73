"""A small transformer over a paged KV cache, with results that do not depend on batching.

How that is done: every operation works on one *tile*, the tokens of one KV block of one sequence, and always has the
same shape. The token at position p is row ``p % block_size`` of tile ``p // block_size``, whatever else is in the
batch; rows that are not asked for are padding. A row of a matrix product depends on no other row, and masked keys get
a probability of exactly 0, so the bits of a token's KV and logits depend on the tokens before it and on nothing else.
(The price is that a decoded token costs a whole tile.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and seed of the model.

    ``sliding_window`` (tokens, None: full attention everywhere) applies to every second layer; the others keep full
    attention.
    """

    vocabulary: int = 4096
    hidden: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    feed_forward: int = 1024
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    seed: int = 0

    def window_of(self, layer: int) -> int | None:
        """The sliding window of ``layer`` in tokens, None for full attention."""
        return self.sliding_window if layer % 2 else None

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers by KV-cache group: those with full attention, then those with a window."""
        every = range(self.layers)
        if self.sliding_window is None:
            return (tuple(every),)
        return tuple(every[::2]), tuple(every[1::2])


@dataclass(slots=True)
class LayerWeights:
    """One layer's matrices, (inputs, outputs)."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class PagedKV:
    """The KV cache: one tensor per layer of a group; other groups share it at the same place.

    ``kv_first`` False: each tensor is (num_blocks, 2, block_size, kv_heads, head_dim); True: (2, num_blocks, ...). A
    block id belongs to one group at a time, so layers of different groups never touch the same block.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, kv_first: bool, device: torch.device
    ) -> None:
        page = (block_size, config.kv_heads, config.head_dim)
        shape = (2, num_blocks, *page) if kv_first else (num_blocks, 2, *page)
        self.kv_first = kv_first
        self.block_size = block_size
        self.tensors = [torch.zeros(shape, device=device) for _ in range(max(len(layers) for layers in config.groups))]
        self.layer_tensor = {layer: place for layers in config.groups for place, layer in enumerate(layers)}
        self.layer_group = {layer: group for group, layers in enumerate(config.groups) for layer in layers}

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys and values in one block."""
        tensor = self.tensors[0]
        return tensor.nbytes // tensor.shape[1 if self.kv_first else 0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block with the keys and values of all layers, of all groups."""
        return self.page_bytes * len(self.layer_tensor)

    def halves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``layer``: views of shape (num_blocks, block_size, kv_heads, head_dim)."""
        tensor = self.tensors[self.layer_tensor[layer]]
        return (tensor[0], tensor[1]) if self.kv_first else (tensor[:, 0], tensor[:, 1])


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Transformer:
    """The model: pre-norm layers, rotary positions, grouped-query attention, gated feed-forward.

    The weights are random, made from ``config.seed`` so that attention is sharp and what it reads dominates: a wrong
    block anywhere in the context changes what is said next.
    """

    def __init__(self, config: ModelConfig, device: str | torch.device = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self.load_weights(config.seed)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        self._frequencies = config.rope_theta**-half

    def load_weights(self, seed: int) -> None:
        """Replace all weights by those of ``seed``."""
        config = self.config
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(rows))).to(self.device)

        heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.embedding = torch.randn(config.vocabulary, config.hidden, generator=generator).to(self.device)
        self.layers = [
            LayerWeights(
                qkv=torch.cat(
                    (matrix(config.hidden, heads + kv_heads, gain=2.0), matrix(config.hidden, kv_heads)), dim=1
                ),
                out=matrix(heads, config.hidden, gain=6.0),
                gate_up=matrix(config.hidden, 2 * config.feed_forward),
                down=matrix(config.feed_forward, config.hidden),
            )
            for _ in range(config.layers)
        ]
        self.head = matrix(config.hidden, config.vocabulary)

    def digest(self) -> str:
        """Return a hash of the configuration and of every matrix, which identifies the weights."""
        state = hashlib.sha256(repr(asdict(self.config)).encode())
        matrices = [matrix for layer in self.layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        for matrix in (*matrices, self.embedding, self.head):
            state.update(matrix.cpu().contiguous().numpy().data)
        return state.hexdigest()

    @torch.inference_mode()
    def forward(self, cache: PagedKV, tokens: Sequence[int], start: int, tables: Sequence[Sequence[int]]) -> Tensor:
        """Compute ``tokens``, which stand at positions from ``start``, of one sequence.

        ``tables[g][i]`` is the block of group g that holds tile i (0 where a window has passed). Reads the KV before
        ``start`` from ``cache``, writes that of the tokens, and returns the logits after the last one, (vocabulary,).
        """
        size, config = cache.block_size, self.config
        end = start + len(tokens)
        tiles = range(start // size, (end - 1) // size + 1)
        origin = tiles[0] * size
        padded = torch.zeros(len(tiles) * size, dtype=torch.long)
        padded[start - origin : end - origin] = torch.tensor(tokens)
        x = list(torch.split(self.embedding[padded.to(self.device)], size))
        rotations = [self._rotation(tile * size, size) for tile in tiles]
        block_tables = [torch.tensor(table[: tiles[-1] + 1], device=self.device) for table in tables]
        masks = {
            window: [self._mask(tile, _first_key_tile(tile, window, size), size, window) for tile in tiles]
            for window in {config.window_of(layer) for layer in range(config.layers)}
        }
        for number, weights in enumerate(self.layers):
            window = config.window_of(number)
            table = block_tables[cache.layer_group[number]]
            keys, values = cache.halves(number)
            queries = []
            for index, tile in enumerate(tiles):
                query, key, value = self._project(weights, x[index], rotations[index])
                rows = slice(max(start - tile * size, 0), min(end - tile * size, size))
                keys[table[tile], rows] = key[rows]
                values[table[tile], rows] = value[rows]
                queries.append(query)
            first = _first_key_tile(tiles[0], window, size)
            gathered_keys = keys[table[first:]].flatten(0, 1)
            gathered_values = values[table[first:]].flatten(0, 1)
            for index, tile in enumerate(tiles):
                span = slice((_first_key_tile(tile, window, size) - first) * size, (tile + 1 - first) * size)
                seen = self._attend(queries[index], gathered_keys[span], gathered_values[span], masks[window][index])
                middle = x[index] + seen @ weights.out
                gate, up = (_normalise(middle) @ weights.gate_up).chunk(2, dim=-1)
                x[index] = middle + (functional.silu(gate) * up) @ weights.down
        logits: Tensor = (_normalise(x[-1]) @ self.head)[end - 1 - tiles[-1] * size]
        return logits

    def _rotation(self, position: int, size: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(position, position + size, dtype=torch.float64)[:, None] * self._frequencies
        return angles.cos().float().to(self.device)[:, None], angles.sin().float().to(self.device)[:, None]

    def _mask(self, tile: int, first: int, size: int, window: int | None) -> Tensor:
        query = torch.arange(tile * size, (tile + 1) * size, device=self.device)[:, None]
        key = torch.arange(first * size, (tile + 1) * size, device=self.device)
        hidden = key > query
        return hidden if window is None else hidden | (key <= query - window)

    def _project(
        self, weights: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        projected = (_normalise(x) @ weights.qkv).view(len(x), -1, config.head_dim)
        turned, value = projected.tensor_split((config.heads + config.kv_heads,), dim=1)
        cosine, sine = rotation
        left, right = turned.chunk(2, dim=-1)
        turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
        return turned[:, : config.heads], turned[:, config.heads :], value

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend (tile, heads, dim) over (context, kv_heads, dim), and return (tile, heads · dim).

        True in ``mask`` hides a key from a query.
        """
        config = self.config
        share = config.heads // config.kv_heads
        grouped = query.view(len(query), config.kv_heads, share, -1).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(grouped, keys.permute(1, 2, 0)) * config.head_dim**-0.5
        scores.view(config.kv_heads, share, len(query), -1).masked_fill_(mask, -math.inf)
        seen = torch.bmm(scores.softmax(dim=-1), values.permute(1, 0, 2))
        return seen.view(config.kv_heads, share, len(query), -1).permute(2, 0, 1, 3).flatten(1)


def _first_key_tile(tile: int, window: int | None, size: int) -> int:
    """The first tile that a query of ``tile`` can see."""
    return 0 if window is None else max(0, tile * size - window + 1) // size
