"""Layouts as pure functions, and the canonical order."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_sao.megatron.mapping.architectures import ARCHITECTURES, read_hf_config
from megatron_sao.megatron.mapping.hf_config import HFConfig
from megatron_sao.megatron.mapping.table import FusedGateUp, FusedQKV, Layout, bind
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "policy")


def shards_of(layout: Layout, wholes: tuple[Tensor, ...], config: HFConfig, size: int = 2) -> list[Tensor]:
    """The ranks' shards, filled as a load fills them; and the wholes again, filled as a gather fills them."""
    shards = [torch.full((sum(map(len, wholes)) // size, 1), -1) for _ in range(size)]
    again = tuple(torch.full_like(whole, -1) for whole in wholes)
    for rank, shard in enumerate(shards):
        for part, piece in enumerate(layout.cut(shard, config, rank=rank, size=size)):
            piece.copy_(layout.place(wholes[part], config, part=part, rank=rank, size=size))
            layout.place(again[part], config, part=part, rank=rank, size=size).copy_(piece)
    assert all(map(torch.equal, again, wholes))
    return shards


def test_fused_qkv_rows_go_group_by_group(moe: Path) -> None:
    config = dataclasses.replace(read_hf_config(moe), num_heads=4, num_kv_heads=2, head_dim=1)
    q, k, v = (torch.tensor([[n] for n in numbers]) for numbers in ([0, 1, 2, 3], [10, 11], [20, 21]))
    shards = shards_of(FusedQKV(), (q, k, v), config)
    assert [shard.flatten().tolist() for shard in shards] == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_fewer_key_value_heads_than_ranks_share_a_groups_rows(moe: Path) -> None:
    config = dataclasses.replace(read_hf_config(moe), num_heads=4, num_kv_heads=2, head_dim=1)
    q, k, v = (torch.tensor([[n] for n in numbers]) for numbers in ([0, 1, 2, 3], [10, 11], [20, 21]))
    shards = shards_of(FusedQKV(), (q, k, v), config, size=4)
    assert [shard.flatten().tolist() for shard in shards] == [[0, 1], [10, 20], [2, 3], [11, 21]]


def test_fused_gate_up_rows_go_shard_by_shard(moe: Path) -> None:
    gate, up = torch.arange(4)[:, None], 10 + torch.arange(4)[:, None]
    shards = shards_of(FusedGateUp(), (gate, up), read_hf_config(moe))
    assert [shard.flatten().tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize("expert_size", [1, 2, 4, 8])
def test_names_and_order_do_not_depend_on_the_layout_but_owners_do(moe: Path, expert_size: int) -> None:
    config = read_hf_config(moe)
    table = ARCHITECTURES[config.architecture]
    bindings = bind(table, config, expert_size)
    names = [binding.hf_names for binding in bindings]
    assert names == [binding.hf_names for binding in bind(table, config, 1)]
    owners = [binding.expert_rank for binding in bindings if "layers.0.mlp.experts" in binding.hf_names[0]]
    assert owners == [expert // (8 // expert_size) for expert in range(8) for _ in ("gate and up", "down")]


def test_a_critic_has_the_policys_tensors_with_another_head(moe: Path) -> None:
    config = read_hf_config(moe)
    table = ARCHITECTURES[config.architecture]
    policy, critic = (
        {name for binding in bind(table, dataclasses.replace(config, role=role), 1) for name in binding.hf_names}
        for role in ("policy", "critic")
    )
    assert (policy - critic, critic - policy) == ({"lm_head.weight"}, {"value_head.weight"})
