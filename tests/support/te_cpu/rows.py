"""Packed rows (thd) as padded batches (bshd), and back."""

from torch import Tensor

from tests.support.te_cpu.extension import Extension


def register(extension: Extension) -> None:
    extension.convert_thd_to_bshd = convert_thd_to_bshd
    extension.convert_bshd_to_thd = convert_bshd_to_thd


def convert_thd_to_bshd(row: Tensor, boundaries: Tensor, num_sequences: int, max_length: int) -> Tensor:
    """[T, ...] to [sequences, longest, ...], zeros behind each sequence's end."""
    batch = row.new_zeros((num_sequences, max_length, *row.shape[1:]))
    for sequence, (start, end) in enumerate(_spans(boundaries)):
        batch[sequence, : end - start] = row[start:end]
    return batch


def convert_bshd_to_thd(batch: Tensor, boundaries: Tensor, num_tokens: int) -> Tensor:
    row = batch.new_zeros((num_tokens, *batch.shape[2:]))
    for sequence, (start, end) in enumerate(_spans(boundaries)):
        row[start:end] = batch[sequence, : end - start]
    return row


def _spans(boundaries: Tensor) -> list[tuple[int, int]]:
    numbers = boundaries.tolist()
    return list(zip(numbers, numbers[1:], strict=False))
