"""SGLang over HTTP: token ids in; token ids, log-probs and weight versions out. Speaks 0.5.20 to 0.5.23.

Nothing is trusted: an answer without exactly one log-prob and one version for each token is an EngineError, never a
sample. A request is repeated only when its connection was refused, so that it cannot run twice.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from megatron_sao.data.routed_experts import RouterShape
from megatron_sao.rollout.engine import EngineError, GenerateRequest, Generation, PauseMode, PromptScore
from megatron_sao.rollout.sglang_answer import read_generation, read_score
from megatron_sao.types import Bucket, WeightVersion

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
"""Sent in full with every request: a server may have other defaults (`preferred_sampling_params`)."""

CONNECT_ATTEMPTS = 4
CONNECT_BACKOFF_S = 0.2  # doubled after each refused connection: 1.4 s in all
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Deadlines of one engine's calls; publish calls bring their own."""

    request_s: float = 1800.0  # generate and score
    control_s: float = 60.0  # everything else


class SGLangEngine:
    """An `Engine` behind a URL. `max_tokens` bounds prompt + answer; `vocab_size` bounds every input id: SGLang checks
    no id, and one outside the vocabulary ends the server process on a CPU.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        vocab_size: int,
        max_tokens: int,
        timeouts: Timeouts | None = None,
        router: RouterShape | None = None,
    ) -> None:
        """`router`: of a model with experts, whose routers' choices generations shall bring along."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._timeouts = timeouts or Timeouts()
        self._router = router
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._running = asyncio.Event()  # not paused
        self._running.set()
        self._abort_after_resume: set[str] = set()
        self._version: WeightVersion | None = None  # of the last publish through this client
        self._num_publishes = 0
        self._keeps_kv = False  # the engine has been paused in_place: its cache holds KV of several versions

    @property
    def name(self) -> str:
        return self._url.removeprefix("http://")

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_tokens(request.input_ids, request.max_new_tokens)
        body = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": SAMPLING
            | {
                "max_new_tokens": request.max_new_tokens,
                "stop_token_ids": list(request.stop_token_ids),
                "ignore_eos": not request.stop_token_ids,  # true would switch the stop tokens off too
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if self._router is not None and request.wants_routed:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.num_routed}
        while True:
            await self._until_resumed()
            version = self._version
            try:
                answer = await self._post("/generate", body | self._cache_key(), timeout_s=self._timeouts.request_s)
            except BaseException:  # a cancellation or a deadline above all: nobody will read what it goes on to sample
                self._abort_soon(request.rid)
                raise
            generation = await self._read(request, answer)
            if not self._read_older_kv(generation, version):
                return generation
            if generation.finish == "abort":
                raise EngineError(self.name, "/generate", None, f"{request.rid} was aborted, and had read older KV")

    async def score(self, input_ids: Sequence[int]) -> PromptScore:
        if len(input_ids) < 2:
            raise ValueError(f"a score needs at least 2 tokens, not {len(input_ids)}")
        self._check_tokens(input_ids, 0)
        body = {
            "input_ids": list(input_ids),
            "sampling_params": SAMPLING | {"max_new_tokens": 0, "stop_token_ids": [], "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        answer = await self._post("/generate", body | self._cache_key(), timeout_s=self._timeouts.request_s)
        return read_score(self.name, input_ids, answer, vocab_size=self._vocab_size)

    async def abort(self, rid: str) -> None:
        """During a pause it is sent after the resume: SGLang would ignore it, mark the request as aborted, and then
        ignore every other abort of it.
        """
        if self._running.is_set():
            await self._control("/abort_request", {"rid": rid, "abort_all": False})
        else:
            self._abort_after_resume.add(rid)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """New requests wait on this side, so that none is admitted with an older version's cache key."""
        self._running.clear()
        self._keeps_kv = self._keeps_kv or mode == "in_place"
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("/continue_generation", {})
        self._running.set()
        rids, self._abort_after_resume = self._abort_after_resume, set()
        for rid in rids:
            await self.abort(rid)

    async def flush(self) -> None:
        await self._control("/flush_cache", {})

    async def begin_update(self) -> bool:
        return await self._session_call("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        await self._session_call("/end_weight_update", {})

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
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s=timeout_s)

    async def leave_group(self, group_name: str) -> None:
        await self._control("/destroy_weights_update_group", {"group_name": group_name})

    async def load_bucket(
        self, bucket: Bucket, *, group_name: str, version: WeightVersion | None, flush: bool, timeout_s: float
    ) -> None:
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [tensor.dtype for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
            "abort_all_requests": False,
            "weight_version": None if version is None else str(version),
        }
        await self._post("/update_weights_from_distributed", body, timeout_s=timeout_s)
        if version is not None:
            self._version, self._num_publishes = version, self._num_publishes + 1

    async def checksum(self) -> Mapping[str, str]:
        answer = await self._control("/weights_checker", {"action": "checksum"})
        try:
            ranks = [rank["checksums"] for rank in answer["ranks"]]
            return {
                f"{name}@rank{number}" if number else name: str(digest)
                for number, checksums in enumerate(ranks)
                for name, digest in checksums.items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(self.name, "/weights_checker", None, f"no checksums in {answer}") from error

    async def reset_tensors(self) -> None:
        await self._control("/weights_checker", {"action": "reset_tensors"})

    async def weight_version(self) -> WeightVersion:
        answer = await self._call("GET", "/model_info", None, timeout_s=self._timeouts.control_s)
        try:
            return int(answer["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(self.name, "/model_info", None, f"no integer weight_version in {answer}") from error

    async def close(self) -> None:
        """Give aborts under way `CLOSE_TIMEOUT_S`, then close the connections; the server runs on."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _check_tokens(self, input_ids: Sequence[int], max_new_tokens: int) -> None:
        bad = next(((i, token) for i, token in enumerate(input_ids) if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"input id {bad[1]} at position {bad[0]} is outside the vocabulary of {self._vocab_size} tokens: "
                "not sent, since it ends an SGLang server; check that tokenizer and model belong together"
            )
        if len(input_ids) + max_new_tokens > self._max_tokens:
            raise ValueError(
                f"{len(input_ids)} prompt tokens and up to {max_new_tokens} new ones exceed this engine's limit of "
                f"{self._max_tokens}: shorten the prompt or lower max_new_tokens"
            )

    async def _read(self, request: GenerateRequest, answer: Any) -> Generation:
        """Expert ids are 200 MB for 131k tokens, 48 layers and top-8: other requests go on meanwhile."""
        if self._router is None or not request.wants_routed:
            return read_generation(self.name, request, answer)
        return await asyncio.to_thread(read_generation, self.name, request, answer, router=self._router)

    def _cache_key(self) -> dict[str, str]:
        """Requests after one publish share cached prefixes; none reads KV of older weights."""
        return {"extra_key": f"{self._version}.{self._num_publishes}"} if self._keeps_kv else {}

    def _read_older_kv(self, generation: Generation, version: WeightVersion | None) -> bool:
        """Whether it was sent with the cache key of `version`, and admitted after a switch that kept that KV: it was on
        its way, or waited in the engine, when the pause came. Such a turn is sampled again.
        """
        begun = generation.versions[0] if generation.versions else None
        is_older = version is not None and begun is not None and version < begun
        return self._keeps_kv and is_older and generation.cached_tokens > 0

    async def _until_resumed(self) -> None:
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                while not self._running.is_set():  # a pause may follow a resume at once
                    await self._running.wait()
        except TimeoutError as error:
            raise EngineError(self.name, "/generate", None, f"paused for {self._timeouts.request_s:g} s") from error

    def _abort_soon(self, rid: str) -> None:
        """Abort from a task of its own: whoever cancelled the request is not kept waiting."""
        task = asyncio.create_task(self._quiet_abort(rid), name=f"abort {rid}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _quiet_abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):  # the request's own error is on its way; SGLang also sees it hang up
            await self.abort(rid)

    async def _session_call(self, path: str, body: Mapping[str, Any]) -> bool:
        try:
            await self._control(path, body)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:  # before 0.5.21 there are no update sessions
                return False
            raise
        return True

    async def _control(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._post(path, body, timeout_s=self._timeouts.control_s)

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        return await self._call("POST", path, body, timeout_s=timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> Any:
        """The JSON of a 200 answer (None where its body is none). Everything else is an EngineError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call_until_connected(method, path, body)
        except TimeoutError as error:
            raise EngineError(self.name, path, None, f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineError(self.name, path, None, f"{type(error).__name__}: {error}") from error

    async def _call_until_connected(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        for attempt in range(CONNECT_ATTEMPTS):
            try:
                return await self._call_once(method, path, body)
            except aiohttp.ClientConnectorError:  # nothing was sent yet
                if attempt == CONNECT_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(CONNECT_BACKOFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _call_once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._open().request(method, self._url + path, json=body) as response:
            data = await response.read()
            if response.status != HTTPStatus.OK:
                text = data.decode("utf-8", errors="replace")
                raise EngineError(self.name, path, response.status, text[:2000] or response.reason or "empty body")
            if response.content_type != "application/json":
                return None
            try:
                answer = await response.json()
            except ValueError as error:
                raise EngineError(self.name, path, None, f"the answer is not JSON: {data[:200]!r}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(self.name, path, response.status, str(answer.get("message")))
        return answer

    def _open(self) -> aiohttp.ClientSession:
        """One connection per request, any number at once: a kept connection may be closed by the server just as a
        request goes out, and that request could not be repeated safely. Proxy variables are not read.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                trust_env=False,
            )
        return self._session
