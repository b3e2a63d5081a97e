"""The two engines of the contract suite, behind one face: the fake one, and a live SGLang server."""

import asyncio
import contextlib
import datetime
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_sao.data.routed_experts import RouterShape
from megatron_sao.rollout.engine import GenerateRequest, Generation
from megatron_sao.rollout.sglang_client import SGLangEngine, Timeouts
from megatron_sao.types import Bucket, TensorSpec
from tests.conftest import LiveServer
from tests.support.fake_engine import FakeEngine

PROMPT = (72, 69, 76, 100, 120, 33, 44, 55)
TIMEOUT_S = 120.0


@dataclass(kw_only=True)
class Subject:
    """An engine under test. `weights` are what it serves at the start of each test, at version 0."""

    engine: SGLangEngine
    url: str
    api_key: str
    weights: Mapping[str, Tensor]
    other_weights: Mapping[str, Tensor]
    long_turn: int  # tokens that take well over a second
    fake: FakeEngine | None = None
    tasks: list[asyncio.Task[Generation]] = field(default_factory=list)

    def start(self, num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[str, asyncio.Task[Generation]]:
        request = GenerateRequest(rid=uuid.uuid4().hex, input_ids=prompt, max_new_tokens=num_tokens)
        task = asyncio.create_task(self.engine.generate(request))
        self.tasks.append(task)
        return request.rid, task

    async def generate(
        self, num_tokens: int, *, prompt: tuple[int, ...] = PROMPT, stops: tuple[int, ...] = ()
    ) -> Generation:
        request = GenerateRequest(
            rid=uuid.uuid4().hex, input_ids=prompt, max_new_tokens=num_tokens, stop_token_ids=stops
        )
        return await self.engine.generate(request)

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Past the client: what the server itself answers."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
            async with session.post(self.url + path, json=body) as response:
                return response.status, await response.text()


@contextlib.asynccontextmanager
async def fake_subject(**options: Any) -> AsyncIterator[Subject]:
    weights = {
        "first": torch.arange(12.0).reshape(3, 4),
        "second": torch.ones(5, dtype=torch.bfloat16),
        "third": torch.arange(7.0),
    }
    other = {name: -tensor - 1 for name, tensor in weights.items()}
    options = {"api_key": "secret", "token_delay_s": 0.004, "weights": weights} | options
    async with FakeEngine(**options) as fake:
        engine = SGLangEngine(
            fake.url,
            api_key=options["api_key"],
            vocab_size=320,
            max_tokens=2048,
            timeouts=Timeouts(request_s=TIMEOUT_S, control_s=TIMEOUT_S),
            router=options.get("router"),
        )
        subject = Subject(
            engine=engine,
            url=fake.url,
            api_key=options["api_key"],
            weights=weights,
            other_weights=other,
            long_turn=400,
            fake=fake,
        )
        try:
            yield subject
        finally:
            await _close(subject)


@contextlib.asynccontextmanager
async def live_subject(
    live: LiveServer, other_model: Path, *, router: RouterShape | None = None
) -> AsyncIterator[Subject]:
    timeouts = Timeouts(request_s=TIMEOUT_S, control_s=TIMEOUT_S)
    engine = SGLangEngine(
        live.url,
        api_key=live.api_key,
        vocab_size=live.vocab_size,
        max_tokens=live.max_tokens,
        timeouts=timeouts,
        router=router,
    )
    subject = Subject(
        engine=engine,
        url=live.url,
        api_key=live.api_key,
        weights=load_file(live.model_path / "model.safetensors"),
        other_weights=load_file(other_model / "model.safetensors"),
        long_turn=1500,
    )
    try:
        yield subject
    finally:
        await subject.post("/continue_generation", {})
        await subject.post("/abort_request", {"abort_all": True})
        await _close(subject)
        await subject.post("/end_weight_update", {})
        original = {"model_path": str(live.model_path), "weight_version": "0", "flush_cache": True}
        status, text = await subject.post("/update_weights_from_disk", original)
        assert status == 200, f"the live server has not got its first weights back: {text}"


async def _close(subject: Subject) -> None:
    for task in subject.tasks:
        task.cancel()
    await asyncio.gather(*subject.tasks, return_exceptions=True)
    await subject.engine.close()


class Sender:
    """A trainer's side of a publish in a few lines: rank 0 of the update group, in this process."""

    def __init__(self, subject: Subject) -> None:
        self.engine = subject.engine
        self.group_name = f"update-{uuid.uuid4().hex}"
        self._store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        self._group: Any = None

    async def __aenter__(self) -> "Sender":
        joined = self.engine.join_group(
            address="127.0.0.1",
            port=self._store.port,
            rank_offset=1,
            world_size=2,
            group_name=self.group_name,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
        self._group, _ = await asyncio.gather(asyncio.to_thread(self._join), joined)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.leave_group(self.group_name)
        dist.destroy_process_group(self._group)

    def _join(self) -> Any:
        store = c10d.PrefixStore(self.group_name, self._store)
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        group, _ = c10d._new_process_group_helper(2, 0, [], "gloo", store, group_name=self.group_name, timeout=timeout)
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        return group

    async def send(self, tensors: Mapping[str, Tensor], *, version: int | None, flush: bool = True) -> None:
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in ordered.values()])
        specs = [
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in ordered.items()
        ]
        bucket = Bucket(tensors=tuple(specs), num_bytes=flat.nbytes)
        load = self.engine.load_bucket(
            bucket, group_name=self.group_name, version=version, flush=flush, timeout_s=TIMEOUT_S
        )
        await asyncio.gather(load, asyncio.to_thread(dist.broadcast, flat, 0, self._group))

    async def publish(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """In two buckets; the engine is paused, and stays so."""
        await self.engine.begin_update()
        names = list(tensors)
        half = len(names) // 2
        await self.send({name: tensors[name] for name in names[:half]}, version=None, flush=False)
        await self.send({name: tensors[name] for name in names[half:]}, version=version)
        await self.engine.end_update()


async def eventually(claim: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> bool:
    """Whether the claim comes true within the time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        if await claim():
            return True
        await asyncio.sleep(0.05)
    return False
