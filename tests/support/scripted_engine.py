"""A FAKE engine on a virtual clock, for tests only: it implements the Engine protocol in this process, without a model.

The clock stands still but for one tick at every resume after a weight update. A request of virtual duration 0 is
answered at once; one of duration 1 gets its first half before and its second half after the next tick, so that its
tokens span two versions. Tokens and log-probs come from a hash of the input ids alone: two runs see the same world. It
really joins the gloo update group and receives the broadcasts.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megatron_sao.rollout.engine import GenerateRequest, Generation, PauseMode, PromptScore
from megatron_sao.types import Bucket, WeightVersion
from tests.support.fake_weights import FakeWeights


class ScriptedEngine:
    """`duration` says of the n-th request (from 0) how many ticks it takes: 0 or 1."""

    def __init__(
        self, weights: Mapping[str, Tensor], *, vocab_size: int, num_tokens: int, duration: Callable[[int], int]
    ) -> None:
        self.weights = FakeWeights(weights, group_timeout_s=30.0)
        self._vocab_size, self._num_tokens, self._duration = vocab_size, num_tokens, duration
        self._version: WeightVersion = 0
        self._tick = asyncio.Event()
        self._num_requests = 0

    name = "scripted"

    async def generate(self, request: GenerateRequest) -> Generation:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        draw = random.Random(repr(request.input_ids))
        output = tuple(draw.randrange(self._vocab_size) for _ in range(self._num_tokens))
        before = self._version
        if self._duration(number):
            await self._tick.wait()
        half = self._num_tokens // 2
        versions = (before,) * half + (self._version,) * (self._num_tokens - half)
        return Generation(
            output_ids=output,
            logprobs=tuple(-math.log(self._vocab_size) + 0.5 * draw.random() for _ in output),
            versions=versions,
            finish="length",
            engine=self.name,
        )

    async def score(self, input_ids: Sequence[int]) -> PromptScore:
        return PromptScore(logprobs=(-1.0,) * (len(input_ids) - 1), cached_tokens=0, version=self._version)

    async def abort(self, rid: str) -> None: ...

    async def pause(self, mode: PauseMode = "retract") -> None: ...

    async def resume(self) -> None:
        self._tick.set()
        self._tick = asyncio.Event()
        for _ in range(50):  # the answered episodes end before anything else happens
            await asyncio.sleep(0)

    async def flush(self) -> None: ...

    async def begin_update(self) -> bool:
        return True

    async def end_update(self) -> None: ...

    async def join_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        await self._done(self.weights.join({**body, "group_name": group_name, "backend": backend}))

    async def leave_group(self, group_name: str) -> None:
        self.weights.leave(group_name)

    async def load_bucket(
        self, bucket: Bucket, *, group_name: str, version: WeightVersion | None, flush: bool, timeout_s: float
    ) -> None:
        body = {
            "group_name": group_name,
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [tensor.dtype for tensor in bucket.tensors],
            "shapes": [tensor.shape for tensor in bucket.tensors],
            "load_format": "flattened_bucket",
        }
        await self._done(self.weights.load(body, frozenset()))
        self._version = self._version if version is None else version

    async def checksum(self) -> Mapping[str, str]:
        return self.weights.checksums()

    async def reset_tensors(self) -> None:
        self.weights.reset()

    async def weight_version(self) -> WeightVersion:
        return self._version

    async def close(self) -> None:
        self.weights.close()

    async def _done(self, work: object) -> None:
        succeeded, message = await work  # type: ignore[misc]
        assert succeeded, message
