"""Bytes of activations that one rank holds at its peak, while it trains on packed rows. Pure numbers.

Counted per token and layer from what autograd saves in Megatron-core 0.16.1: with the local spec as measured on a CPU
(attention scores are quadratic there), with Transformer Engine's as read in its source and in Megatron's, and measured
with its modules on torch's kernels (`make test-te`; the scores, which those keep, are not counted). Sparse attention
likewise, in 0.19.2; its fused kernels are only read.
"""

from dataclasses import dataclass

from megatron_sao.config import LayoutConfig, Recompute
from megatron_sao.megatron.mapping.hf_config import HFConfig

EXPERT_IMBALANCE = 1.5
"""[choice] Tokens of the busiest expert rank over those of the average one; without expert parallelism it is 1."""

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """How rows pass through a model."""

    layout: LayoutConfig
    item_bytes: int  # of the model's type: 2 or 4
    max_tokens: int  # of a row, before context parallelism cuts it
    recompute: Recompute
    transformer_engine: bool
    expert_imbalance: float = EXPERT_IMBALANCE

    @property
    def row(self) -> int:
        """Tokens of a row on one context rank."""
        return -(-self.max_tokens // self.layout.context)

    @property
    def shard(self) -> int:
        """Those on one tensor rank, where sequence parallelism cuts the row once more."""
        return -(-self.row // self.layout.tensor)

    @property
    def routed(self) -> int:
        """Tokens that the experts of the busiest rank see, for each expert that a token chooses."""
        spread = self.layout.expert * self.layout.expert_tensor > 1
        return round(self.shard * self.layout.expert_tensor * (self.expert_imbalance if spread else 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes on one rank at the peak: what lives from forward to backward, and the larger of two workplaces."""

    kept_bytes: int  # of all layers and micro-batches that are in flight
    layer_bytes: int  # of the layer at work: recomputed activations and temporaries
    logits_bytes: int  # of the loss; 0 without an output layer

    @property
    def peak_bytes(self) -> int:
        return self.kept_bytes + max(self.layer_bytes, self.logits_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    kept: int  # saved by autograd
    scores: int  # of that, what selective recomputation does without
    working: int  # temporaries, in the forward or backward of the layer
    choice: int = 0  # of the tokens that a sparse attention sees: kept for later layers, whatever is recomputed


def activations(hf: HFConfig, way: Pass, chunks: tuple[range, ...], pipeline_rank: int) -> Activations:
    """Of a rank that holds the layers of `chunks` (one range without virtual stages)."""
    layers = [_layer(hf, way, layer) for chunk in chunks for layer in chunk]
    stream = hf.hidden_size * way.item_bytes * way.shard
    kept = sum(_kept(layer, way, stream) for layer in layers) * _in_flight(way.layout, pipeline_rank)
    is_last = pipeline_rank == way.layout.pipeline - 1
    return Activations(
        kept_bytes=round(kept) + 2 * stream + _once(hf, way),  # the stream itself, and its gradient
        layer_bytes=max(_at_work(layer, way) for layer in layers),
        logits_bytes=_logits(hf, way) if is_last else 0,
    )


def _kept(layer: _Layer, way: Pass, stream: int) -> int:
    return {"none": layer.kept, "selective": layer.kept - layer.scores, "full": stream}[way.recompute] + layer.choice


def _at_work(layer: _Layer, way: Pass) -> int:
    again = {"none": 0, "selective": layer.scores, "full": layer.kept}[way.recompute]
    return again + layer.working


def _in_flight(layout: LayoutConfig, pipeline_rank: int) -> float:
    """Micro-batches between their forward and backward on this rank, as multiples of all its layers.

    1F1B: as many as there are stages from here to the end. Interleaved, counted in chunks: two for each such stage
    but the last, and all but the last chunk of every stage (megatron.core.pipeline_parallel.schedules).
    """
    behind, chunks = layout.pipeline - 1 - pipeline_rank, layout.virtual_stages
    if chunks == 1:
        return behind + 1
    return (2 * behind + (chunks - 1) * layout.pipeline + 1) / chunks


def _layer(hf: HFConfig, way: Pass, layer: int) -> _Layer:
    if hf.computes_sparse:
        attention = _sparse_attention(hf, way, has_indexer=hf.has_indexer[layer])
    else:
        attention = _te_attention(hf, way) if way.transformer_engine else _local_attention(hf, way)
    mlp = _experts(hf, way) if hf.is_moe_layer[layer] else _mlp(way, hf.ffn_size)
    norms = _norms(hf, way)
    return _Layer(
        kept=attention.kept + mlp.kept + norms,
        scores=attention.scores,
        working=max(attention.working - mlp.kept, mlp.working),  # the backward is through with one before the other
        choice=attention.choice,
    )


def _norms(hf: HFConfig, way: Pass) -> int:
    """Of the two in a layer: the residual stream that goes in, what comes out. The local one computes in float32."""
    local = 2 * way.item_bytes + 4 if way.item_bytes == _FLOAT32 else 8
    return 2 * hf.hidden_size * way.shard * (2 * way.item_bytes if way.transformer_engine else local)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Widths:
    """Numbers per token of one layer's attention, over all heads."""

    q: int
    k: int
    v: int
    latent: int  # that every tensor rank computes whole: compressed queries, keys and values, before and after norms


def _widths(hf: HFConfig) -> _Widths:
    if hf.kv_lora_rank:  # every head has its own key, in which the rotated part is repeated
        q = hf.num_heads * (hf.nope_head_dim + hf.rope_head_dim)
        latent = 2 * (hf.q_lora_rank + hf.kv_lora_rank) + hf.rope_head_dim
        return _Widths(q=q, k=q, v=hf.num_heads * hf.value_head_dim, latent=latent)
    kv = hf.num_kv_heads * hf.head_dim
    return _Widths(q=hf.num_heads * hf.head_dim, k=kv, v=kv, latent=0)


def _te_attention(hf: HFConfig, way: Pass) -> _Layer:
    """Projections (which norms read, or whose parts are joined to keys), rotated q and k, output, its log-sum-exp."""
    w, b = _widths(hf), way.item_bytes
    numbers = way.row // way.layout.tensor
    output = w.v if hf.kv_lora_rank else w.q
    kept = numbers * ((2 * w.q + 2 * w.k + w.v + output) * b + hf.num_heads * 2 * _FLOAT32)
    working = numbers * (w.q + w.k + w.v + output) * b  # gradients, and keys and values from other context ranks
    return _Layer(kept=kept + way.shard * w.latent * b, scores=0, working=working + numbers * (w.k + w.v) * b)


def _local_attention(hf: HFConfig, way: Pass) -> _Layer:
    """As Transformer Engine's, with float32 copies by the norms, keys and values repeated for each head, and scores."""
    w, b = _widths(hf), way.item_bytes
    is_float32 = b == _FLOAT32
    per_token = 4 * (7 * w.q + 2 * w.k + w.v) if is_float32 else 6 * (w.q + w.k) + 8 * w.q
    table = 4 * (hf.head_dim or hf.rope_head_dim) * b * way.row
    pairs = way.row * way.row * hf.num_heads // way.layout.tensor
    scores = pairs * (4 if is_float32 else 6)
    kept = way.row * per_token // way.layout.tensor + way.shard * w.latent * b + table + scores
    return _Layer(kept=kept, scores=scores, working=pairs * (12 if is_float32 else 8))


def _sparse_attention(hf: HFConfig, way: Pass, *, has_indexer: bool) -> _Layer:
    """Queries before and after the keys' up projection is multiplied in, their output before and after the values'.

    With Transformer Engine fused kernels are assumed (`Platform.sparse_kernels`). Without: keys and values repeated for
    each head, three copies and masks of the scores, and the indexer's scores, of which every tensor rank has all.
    """
    b, heads, latent = way.item_bytes, hf.num_heads // way.layout.tensor, hf.kv_lora_rank
    query, key = hf.nope_head_dim + hf.rope_head_dim, latent + hf.rope_head_dim
    kept = way.row * (heads * (query + key + latent + hf.value_head_dim) + key) * b + way.shard * _widths(hf).latent * b
    choice = way.row * min(hf.index_topk, way.max_tokens) * 8 * has_indexer
    if way.transformer_engine:
        gradients = way.row * heads * (query + key + latent) * b
        return _Layer(kept=kept + way.row * heads * 2 * _FLOAT32, scores=0, working=gradients, choice=choice)
    pairs = way.row * way.row
    scores = pairs * heads * (15 if b == _FLOAT32 else 13)
    indexer = 2 * pairs * hf.index_num_heads * _FLOAT32 * has_indexer
    repeated = way.row * heads * (key * _FLOAT32 + latent * b)
    working = max(pairs * heads * 12, indexer)
    return _Layer(kept=kept + scores + repeated, scores=scores + repeated, working=working, choice=choice)


def _experts(hf: HFConfig, way: Pass) -> _Layer:
    """k copies of a token, sorted; in an expert of width f as in `_mlp`, and the product times the router's weight."""
    k, b, f = hf.experts_per_token, way.item_bytes, hf.expert_ffn_size // way.layout.expert_tensor
    router = way.shard * hf.num_experts * (2 * _FLOAT32 + 2)
    shared = _mlp(way, hf.num_shared_experts * hf.expert_ffn_size).kept
    kept = way.routed * k * (hf.hidden_size + 6 * f) * b + router + shared
    return _Layer(kept=kept, scores=0, working=way.routed * k * (3 * hf.hidden_size + f) * b)


def _mlp(way: Pass, width: int) -> _Layer:
    """Gate and up, silu(gate), up again, their product."""
    numbers = way.row * width // way.layout.tensor * way.item_bytes
    return _Layer(kept=5 * numbers, scores=0, working=2 * numbers)


def _logits(hf: HFConfig, way: Pass) -> int:
    """Logits, those of action tokens, and four float32 copies with a mask in `logprobs.py` (three in its backward)."""
    if hf.role == "critic":
        return 2 * way.shard * hf.hidden_size * _FLOAT32
    return way.row * hf.vocab_size // way.layout.tensor * (2 * way.item_bytes + 17)


def _once(hf: HFConfig, way: Pass) -> int:
    """Without Transformer Engine, for all layers: a mask of one byte a pair, and Megatron's buffer for the scores."""
    heads = hf.num_heads // way.layout.tensor
    return 0 if way.transformer_engine or hf.computes_sparse else way.row * way.row * (1 + heads * way.item_bytes)
