"""The weights half of the fake SGLang server (tests only): a real gloo group, real broadcasts, no model."""

import asyncio
import datetime
import hashlib
from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Outcome = tuple[bool, str]


class FakeWeights:
    """Tensors under HF names. Names that it does not know are dropped silently, as SGLang does; if it knows none, all
    are kept."""

    def __init__(self, weights: Mapping[str, Tensor], group_timeout_s: float) -> None:
        self._timeout = datetime.timedelta(seconds=group_timeout_s)
        self.served = {name: tensor.clone() for name, tensor in weights.items()}
        self.received: dict[str, Tensor] = {}
        self._groups: dict[str, dist.ProcessGroupGloo] = {}
        self._closed = bool(weights)

    async def join(self, body: Mapping[str, Any]) -> Outcome:
        if body["backend"] != "gloo":
            return False, f"backend {body['backend']!r} is not available here"
        if body["group_name"] in self._groups:
            return False, f"group {body['group_name']} exists already"
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(_join, body, self._timeout)
        except (RuntimeError, ValueError) as error:
            return False, f"Failed to initialize the group: {error}"
        return True, "Succeeded to initialize custom process group."

    def leave(self, group_name: str) -> Outcome:
        group = self._groups.pop(group_name, None)
        return (False, f"group {group_name} does not exist") if group is None else (True, "")

    async def load(self, body: Mapping[str, Any], skip: Set[str]) -> Outcome:
        group = self._groups.get(body["group_name"])
        if group is None:
            return False, f"Group {body['group_name']} not in the update groups"
        try:
            tensors = await asyncio.to_thread(_receive, group, body)
        except RuntimeError as error:
            return False, f"Failed to receive weights: {error}"
        self.received |= tensors
        for name, tensor in tensors.items():
            if name not in skip and (name in self.served or not self._closed):
                self.served[name] = tensor.to(self.served[name].dtype if name in self.served else tensor.dtype)
        return True, "Succeeded to update parameter online."

    def reset(self) -> None:
        for name, tensor in self.served.items():
            self.served[name] = torch.randn(tensor.shape).to(tensor.dtype)

    def checksums(self) -> dict[str, str]:
        return {name: hashlib.sha256(_bytes(tensor)).hexdigest()[:16] for name, tensor in self.served.items()}

    def close(self) -> None:
        self._groups.clear()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _join(body: Mapping[str, Any], timeout: datetime.timedelta) -> dist.ProcessGroupGloo:
    """SGLang calls torch's `_new_process_group_helper`; that registers the group by name in this process, where a
    test's sender may live too. So the same nest of stores is built by hand.
    """
    name = body["group_name"]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=timeout
    )
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timeout)


def _receive(group: dist.ProcessGroupGloo, body: Mapping[str, Any]) -> dict[str, Tensor]:
    dtypes = [getattr(torch, name) for name in body["dtypes"]]
    empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
    tensors = dict(zip(body["names"], empty, strict=True))
    if body.get("load_format") != "flattened_bucket":
        for tensor in tensors.values():
            _broadcast(group, tensor)
        return tensors
    flat = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    _broadcast(group, flat)
    offset = 0
    for name, tensor in tensors.items():
        if offset % tensor.itemsize:
            raise RuntimeError(f"Unaligned: {name} starts at byte {offset}")
        piece = flat[offset : offset + tensor.nbytes]
        tensors[name] = piece.view(tensor.dtype).reshape(tensor.shape)
        offset += tensor.nbytes
    return tensors


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
