"""What keeps the sequences of a row apart is made from lengths that the host knows."""

import pytest
import torch

from megatron_sao.megatron.layer_specs import attention_inputs


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_is_read_back_from_the_device(packed: bool) -> None:
    """A tensor on "meta" has no values: reading one, or a shape that depends on values, raises."""
    mask, sequences = attention_inputs((3, 5, 2), device=torch.device("meta"), packed=packed)

    assert (sequences.cu_seqlens_q if packed else mask).device.type == "meta"


def test_boundaries_are_those_of_the_lengths() -> None:
    _, sequences = attention_inputs((3, 5, 2), device=torch.device("cpu"), packed=True)

    assert sequences.cu_seqlens_q.tolist() == sequences.cu_seqlens_kv.tolist() == [0, 3, 8, 10]
    assert sequences.cu_seqlens_q.dtype == torch.int32
    assert sequences.max_seqlen_q == sequences.max_seqlen_kv == 5


def test_a_token_sees_its_own_sequence_up_to_itself() -> None:
    mask, _ = attention_inputs((2, 1, 3), device=torch.device("cpu"), packed=False)

    segments = [0, 0, 1, 2, 2, 2]
    seen = [[segments[i] == segments[j] and j <= i for j in range(6)] for i in range(6)]
    assert (~mask[0, 0]).tolist() == seen
