"""The output layer in pieces against torch's log_softmax on whole logits, on real ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sao.megatron.output_layer import Sums, Vocabulary, logprobs_of_states, loss_of_states
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_ranks

TOKENS, HIDDEN, VOCAB, PIECE = 24, 6, 25, 4
CHOSEN = (20, 0, 3, 4, 23, 7, 8, 9, 11, 2, 16, 17, 12, 5)  # three pieces and a half, in no order
SCALE = 3.0  # of the gradient that comes in


@dataclass(frozen=True)
class Chosen:
    state_index_a: Tensor
    targets_a: Tensor


def make_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and a weight for each chosen state; some targets on the edges of the shards."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    hidden[8] *= 1e4  # large logits must not overflow
    targets = torch.randint(0, VOCAB, (len(CHOSEN),), generator=generator)
    targets[:6] = torch.tensor([0, 8, 9, 12, 13, 24])
    targets[6] = (hidden[8] @ weight.T).argmax()
    return hidden, weight, targets, torch.linspace(-1, 2, len(CHOSEN))


def whole_reference() -> dict[str, Tensor]:
    hidden, weight, targets, factors = make_case()
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(leaves[0][list(CHOSEN)] @ leaves[1].T, -1)
    logprobs = log_p[torch.arange(len(CHOSEN)), targets]
    total = (factors * logprobs + 0.1 * logprobs**2).sum()
    gradients = torch.autograd.grad(SCALE * total, leaves)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e9)).sum(-1)
    return {"logprobs": logprobs, "entropy": entropy, "hidden": gradients[0], "weight": gradients[1], "loss": total}


def shard(rank: int, size: int) -> tuple[Tensor, Vocabulary, Chosen, Tensor]:
    """This rank's part of the case. The last ones have padding, which would win a softmax."""
    hidden, weight, targets, factors = make_case()
    padding = -(VOCAB + 1) % size + 1
    rows = torch.cat([weight, 100 * hidden[list(CHOSEN[:padding])]]).chunk(size)[rank].clone().requires_grad_()
    group: Any = dist.group.WORLD
    vocabulary = Vocabulary(weight_vH=rows, num_ids=VOCAB, group=group, piece_tokens=PIECE)
    own = hidden.chunk(size)[rank].unsqueeze(1).clone().requires_grad_()
    return own, vocabulary, Chosen(torch.tensor(CHOSEN), targets), factors


def on_rank(rank: int, size: int) -> dict[str, Any]:
    hidden, vocabulary, chosen, factors = shard(rank, size)

    def of_piece(logprobs: Tensor, entropy: Tensor, piece: slice) -> tuple[Tensor, Sums]:
        assert not entropy.requires_grad
        found = {"logprobs": logprobs.detach().clone(), "entropy": entropy}
        return (factors[piece] * logprobs + 0.1 * logprobs**2).sum(), found

    def run(chosen: Chosen) -> tuple[Tensor, list[Sums]]:
        return loss_of_states(hidden, chosen, of_piece, vocabulary)

    weight = vocabulary.weight_vH
    total, sums = run(chosen)
    of_hidden, of_weight = torch.autograd.grad(SCALE * total, (hidden, weight))
    nothing, of_none = run(Chosen(chosen.state_index_a[:0], chosen.targets_a[:0]))
    assert len(of_none) == 1
    empty = torch.autograd.grad(nothing, (hidden, weight))
    weight.requires_grad_(False)
    (of_hidden_alone,) = torch.autograd.grad(SCALE * run(chosen)[0], hidden)
    weight.requires_grad_()
    hidden.requires_grad_(False)
    (of_weight_alone,) = torch.autograd.grad(SCALE * run(chosen)[0], weight)
    main = {zeroed: kept_by_megatron(weight, SCALE * run(chosen)[0], zeroed) for zeroed in (False, True)}
    return {
        "logprobs": torch.cat([each["logprobs"] for each in sums]),
        "entropy": torch.cat([each["entropy"] for each in sums]),
        "scored": logprobs_of_states(hidden, chosen, vocabulary),
        "loss": total.detach(),
        "hidden": of_hidden[:, 0],
        "weight": of_weight,
        "alone": (of_hidden_alone[:, 0], of_weight_alone),
        "main": main,
        "empty": (float(nothing), *(float(gradient.abs().sum()) for gradient in empty)),
        "sizes": [len(each["logprobs"]) for each in sums],
    }


def kept_by_megatron(weight: Any, total: Tensor, zeroed: bool) -> Tensor:
    """The main gradient that a backward adds to, from 1; what autograd gets is not added where DDP leaves it out."""
    weight.main_grad, weight.zero_out_wgrad = torch.ones_like(weight), zeroed
    weight.grad_added_to_main_grad, weight.grad = False, None
    total.backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert not zeroed or not weight.grad.any()
    kept: Tensor = weight.main_grad
    del weight.main_grad
    return kept


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_give_what_whole_logits_give(size: int) -> None:
    want = whole_reference()
    parts = run_ranks(size, on_rank, size)
    for part in parts:
        assert part["sizes"] == [4, 4, 4, 2]
        for name in ("logprobs", "entropy", "loss"):
            torch.testing.assert_close(part[name].double(), want[name], rtol=1e-6, atol=2e-6)
        assert torch.equal(part["scored"], part["logprobs"])
        assert part["empty"] == (0, 0, 0)
        assert torch.equal(part["alone"][0], part["hidden"])
        assert torch.equal(part["alone"][1], part["weight"])
        for kept in part["main"].values():
            torch.testing.assert_close(kept, part["weight"] + 1, rtol=1e-6, atol=1e-6)
    found = torch.cat([part["hidden"] for part in parts])
    torch.testing.assert_close(found.double(), want["hidden"], rtol=1e-5, atol=2e-6)
    found = torch.cat([part["weight"] for part in parts])
    torch.testing.assert_close(found[:VOCAB].double(), want["weight"], rtol=1e-5, atol=1e-5)
    assert not found[VOCAB:].any()


def alike_in_bfloat16(rank: int) -> tuple[Tensor, Tensor]:
    """The weight's gradient of 600 equal states, one a piece, and of one."""
    group: Any = dist.group.WORLD
    hidden = torch.ones(600, 1, 2, dtype=torch.bfloat16)
    weight: Any = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for number in (600, 1):
        weight.main_grad = torch.zeros(2, 2)
        vocabulary = Vocabulary(weight_vH=weight, num_ids=2, group=group, piece_tokens=1)
        chosen = Chosen(torch.arange(number), torch.zeros(number, dtype=torch.int64))
        loss_of_states(hidden, chosen, summed, vocabulary)[0].backward()
        found.append(weight.main_grad)
    return found[0], found[1]


def summed(logprobs: Tensor, _: Tensor, __: slice) -> tuple[Tensor, Sums]:
    return logprobs.sum(), {}


@pytest.mark.ranks
def test_the_weights_gradient_is_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    ((many, one),) = run_ranks(1, alike_in_bfloat16)
    assert one.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert torch.equal(many, 600 * one)


def peak_bytes(rank: int) -> tuple[int, int]:
    """Of an update and of scoring, beyond what is there before."""
    group: Any = dist.group.WORLD
    hidden, weight = torch.randn(512, 1, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    chosen = Chosen(torch.arange(0, 512, 2), torch.arange(256))
    vocabulary = Vocabulary(weight_vH=weight, num_ids=4096, group=group, piece_tokens=16)
    with LiveBytes() as update:
        loss_of_states(hidden, chosen, summed, vocabulary)[0].backward()
    with LiveBytes() as scoring:
        logprobs_of_states(hidden, chosen, vocabulary)
    return update.peak, scoring.peak


@pytest.mark.ranks
def test_no_logits_outlive_their_piece() -> None:
    """A piece has two float32 numbers per state and id: 8 bytes of 16 states and 4,096 ids; all 256 would have 8 MiB.
    The weight's gradient is there twice while it is added, and small things."""
    ((update, scoring),) = run_ranks(1, peak_bytes)
    piece, weight = 8 * 16 * 4096, 4 * 8 * 4096
    assert piece <= scoring <= 1.1 * piece
    assert piece <= update <= 1.1 * piece + 2 * weight
