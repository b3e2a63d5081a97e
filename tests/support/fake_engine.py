"""A FAKE SGLang server, for tests only: the HTTP contract without a model.

It samples tokens from a hash, or as a test scripts them; it really joins the gloo update group and receives broadcasts;
it can be told to wait, fail, hang, lie or speak as 0.5.20. tests/rollout/test_engine_contract.py holds it to what a
live SGLang 0.5.23 does.
"""

import asyncio
import base64
import dataclasses
import json
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from torch import Tensor

from megatron_sao.data.routed_experts import RouterShape
from tests.support.fake_weights import FakeWeights

Answer = Callable[[list[int]], Sequence[int]]
"""From a request's input ids to the tokens to be sampled; after them the hash goes on."""


@dataclasses.dataclass
class Faults:
    """What goes wrong, by a test's order. Numbers count calls of that kind from 0."""

    edit_generation: Callable[[dict[str, Any]], dict[str, Any] | bytes | None] | None = None  # None: hang up
    fail_generate_status: int | None = None
    hang_generate: bool = False
    hang_abort: bool = False
    fail_load: Mapping[int, int] = dataclasses.field(default_factory=dict)  # load call -> HTTP status, nothing received
    hang_load: frozenset[int] = frozenset()  # load calls that neither receive nor answer
    skip_tensors: frozenset[str] = frozenset()  # received, said to be loaded, and lost
    fail_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)  # path -> HTTP status


@dataclasses.dataclass
class _Request:
    rid: str
    input_ids: list[int]
    started: bool = False
    abort_sent: bool = False
    aborted: bool = False
    num_retractions: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[str] = dataclasses.field(default_factory=list)


class FakeEngine:
    """`async with FakeEngine() as fake: SGLangEngine(fake.url, ...)`. Attributes may be changed while it runs."""

    def __init__(
        self,
        *,
        version: str = "0.5.23",
        api_key: str | None = None,
        vocab_size: int = 320,
        context_length: int = 2048,
        eos_token_id: int = 2,
        token_delay_s: float = 0.0,
        answer: Answer | None = None,
        weights: Mapping[str, Tensor] | None = None,
        group_timeout_s: float = 30.0,
        faults: Faults | None = None,
        router: RouterShape | None = None,  # routed experts are returned, by `experts_of`
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,  # a scripted virtual clock, where a test has one
    ) -> None:
        self.version, self.api_key, self.vocab_size = version, api_key, vocab_size
        self.context_length, self.eos_token_id, self.token_delay_s = context_length, eos_token_id, token_delay_s
        self.answer, self.faults, self.sleep = answer, faults or Faults(), sleep
        self.weights = FakeWeights(weights or {}, group_timeout_s)
        self.router = router
        self.weight_version = "0"
        self.paused: str | None = None
        self.session_open = False
        self.died: str | None = None  # why this server is gone, as a real one would be
        self.url = ""
        self.calls: list[tuple[str, Any]] = []  # every (path, body), in order of arrival
        self.aborted: list[str] = []  # request ids that ended early
        self._requests: dict[str, _Request] = {}
        self._cache: list[list[int]] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def received(self) -> Mapping[str, Tensor]:
        """Every tensor that came by broadcast, the newest under each HF name."""
        return self.weights.received

    @property
    def running(self) -> list[str]:
        return [request.rid for request in self._requests.values() if request.started]

    @property
    def waiting(self) -> list[str]:
        return [request.rid for request in self._requests.values() if not request.started]

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> str:
        app = web.Application(middlewares=[self._guard], client_max_size=2**30)
        for path, handler in {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_distributed": self._load,
            "/weights_checker": self._check_weights,
        }.items():
            app.router.add_post(path, handler)
        if self._has_sessions:
            app.router.add_post("/begin_weight_update", self._begin)
            app.router.add_post("/end_weight_update", self._end)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/health", self._health)
        # As in SGLang, a client that hangs up is not noticed at once: its request runs on until it is aborted.
        self._runner = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=0.5, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self.weights.close()

    @property
    def _has_sessions(self) -> bool:
        return tuple(int(part) for part in self.version.split(".")) >= (0, 5, 21)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.died is not None:
            return _hang_up(request)
        open_to_all = request.path.startswith(("/health", "/ready"))
        if self.api_key and not open_to_all and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        raw = await request.read()
        self.calls.append((request.path, json.loads(raw) if raw else None))
        if request.path in self.faults.fail_calls:
            return _reply(False, "scripted failure", self.faults.fail_calls[request.path])
        response: web.StreamResponse = await handler(request)
        return response

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params, ids = body["sampling_params"], body["input_ids"]
        refusal = self._refusal(body["rid"] if "rid" in body else os.urandom(8).hex(), ids, params)
        if refusal:
            return web.json_response({"error": {"message": refusal}}, status=400)
        if self.faults.fail_generate_status:
            return web.json_response({"error": {"message": "scripted"}}, status=self.faults.fail_generate_status)
        if any(not 0 <= token < self.vocab_size for token in ids):
            self.died = "an input id outside the vocabulary"
            return _hang_up(http)
        request = _Request(rid=body.get("rid") or os.urandom(16).hex(), input_ids=list(ids))
        self._requests[request.rid] = request
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.paused is None)
            request.started = True
            cached = 0 if body["logprob_start_len"] == 0 else self._cached(ids)
            finish = await self._sample(request, params)
        finally:
            del self._requests[request.rid]
            async with self._changed:
                self._changed.notify_all()
        self._cache.append(request.input_ids + request.output)
        return self._respond(http, self._generation(request, finish, cached, body))

    def _refusal(self, rid: str, ids: Sequence[int], params: Mapping[str, Any]) -> str | None:
        if rid in self._requests:
            return f"Duplicate request ID detected: {rid}"
        if not ids:
            return "input_ids is empty"
        if len(ids) + params["max_new_tokens"] > self.context_length:
            return f"{len(ids)} input and {params['max_new_tokens']} new tokens exceed {self.context_length}"
        return None

    async def _sample(self, request: _Request, params: Mapping[str, Any]) -> dict[str, Any]:
        if self.faults.hang_generate:
            await asyncio.Event().wait()
        script = list(self.answer(request.input_ids)) if self.answer else []
        stops = set() if params["ignore_eos"] else {*params["stop_token_ids"], self.eos_token_id}
        for position in range(params["max_new_tokens"]):
            await self.sleep(self.token_delay_s)
            async with self._changed:
                await self._changed.wait_for(lambda: self.paused is None or request.aborted)
            if request.aborted:
                self.aborted.append(request.rid)
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            past = request.input_ids + request.output
            token = script[position] if position < len(script) else self.sampled_token(past)
            request.output.append(token)
            request.logprobs.append(self.logprob(past[-1], token))
            request.versions.append(self.weight_version)
            if token in stops:
                return {"type": "stop", "matched": token}
        return {"type": "length", "length": params["max_new_tokens"]}

    def sampled_token(self, past: Sequence[int]) -> int:
        return zlib.crc32(repr((self.weight_version, list(past))).encode()) % (self.vocab_size - 3) + 3

    def logprob(self, previous: int, token: int) -> float:
        """The fake model's log-prob: of a pair of tokens and the weight version, in (-4.1, -0.1)."""
        return -0.1 - zlib.crc32(repr((self.weight_version, previous, token)).encode()) % 4000 / 1000

    def _cached(self, ids: Sequence[int]) -> int:
        return max((_common(ids[:-1], known) for known in self._cache), default=0)

    def _generation(
        self, request: _Request, finish: Mapping[str, Any], cached: int, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        ids = request.input_ids
        scored: list[list[Any]] = []
        if body["logprob_start_len"] == 0:
            scored = [[None, ids[0], None]]
            scored += [[self.logprob(ids[i - 1], ids[i]), ids[i], None] for i in range(1, len(ids))]
        meta = {
            "id": request.rid,
            "finish_reason": dict(finish),
            "prompt_tokens": len(ids),
            "completion_tokens": len(request.output),
            "cached_tokens": cached,
            "num_retractions": request.num_retractions,
            "weight_version": self.weight_version,
            "weight_versions": _spans(request.versions),
            "input_token_logprobs": scored,
            "output_token_logprobs": [[p, t, None] for p, t in zip(request.logprobs, request.output, strict=True)],
        }
        if body.get("return_routed_experts") and self.router is not None:
            rows = experts_of(self.router, [*ids, *request.output][body["routed_experts_start_len"] : -1])
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        return {"text": "", "output_ids": list(request.output), "meta_info": meta}

    def _respond(self, http: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        edited = self.faults.edit_generation(answer) if self.faults.edit_generation else answer
        if edited is None:
            return _hang_up(http)
        if isinstance(edited, bytes):
            return web.Response(body=edited, content_type="application/json")
        return web.json_response(edited)

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _reply(False, f"unknown mode {mode!r}", 400)
        self.paused = mode
        for request in self._requests.values():
            request.num_retractions += request.started and mode == "retract"
        if mode == "abort":
            await self._end_requests(lambda _: True)
            async with self._changed:
                await self._changed.wait_for(lambda: not self.running)
        return web.json_response({"message": "Generation paused", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await http.json()
        async with self._changed:
            self.paused = None
            self._changed.notify_all()
        return web.json_response({"message": "Generation continued", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        """By exact id at the door, by prefix behind it; a request that waits at the door is marked and never ends."""
        if self.faults.hang_abort:
            await asyncio.sleep(600)
        body = await http.json()
        rid, everything = body.get("rid", ""), body.get("abort_all", False)
        known = self._requests.get(rid)
        if everything:
            await self._end_requests(lambda _: True)
        elif known is not None and not known.abort_sent:
            known.abort_sent = True
            await self._end_requests(lambda request: request.rid.startswith(rid))
        return web.Response(status=200)

    async def _end_requests(self, matches: Callable[[_Request], bool]) -> None:
        async with self._changed:
            for request in self._requests.values():
                request.aborted |= request.started and matches(request)
            self._changed.notify_all()

    async def _flush(self, http: web.Request) -> web.Response:
        if self.running and self.paused != "retract":
            return web.Response(text="Flush cache failed.", status=400)
        self._cache.clear()
        return web.Response(text="Cache flushed.")

    async def _begin(self, http: web.Request) -> web.Response:
        if self.session_open:
            return _reply(False, "a weight update session is already open", 400)
        self.session_open = True
        return _reply(True, "")

    async def _end(self, http: web.Request) -> web.Response:
        if not self.session_open:
            return _reply(False, "no weight update session is open", 400)
        self.session_open = False
        return _reply(True, "")

    async def _join(self, http: web.Request) -> web.Response:
        return _reply(*await self.weights.join(await http.json()))

    async def _leave(self, http: web.Request) -> web.Response:
        return _reply(*self.weights.leave((await http.json()).get("group_name", "weight_update_group")))

    async def _load(self, http: web.Request) -> web.Response:
        body = await http.json()
        number = sum(path == "/update_weights_from_distributed" for path, _ in self.calls) - 1
        if self._has_sessions and not self.session_open:
            return _reply(False, "call begin_weight_update first", 400)
        if number in self.faults.hang_load:
            await asyncio.Event().wait()
        if number in self.faults.fail_load:
            return _reply(False, "scripted failure", self.faults.fail_load[number])
        async with self._changed:
            await self._changed.wait_for(lambda: self.paused is not None or not self._requests)
        success, message = await self.weights.load(body, skip=self.faults.skip_tensors)
        if success and body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        if success and body.get("flush_cache", True):
            if self.running and self.paused != "retract":
                return _reply(False, "Weights were updated, but the cache was not flushed.", 400)
            self._cache.clear()
        return _reply(success, message)

    async def _check_weights(self, http: web.Request) -> web.Response:
        action = (await http.json()).get("action", "checksum")
        if action == "reset_tensors":
            self.weights.reset()
            return _reply(True, "")
        if action != "checksum" or not self._has_sessions:
            return _reply(False, "Torch not compiled with CUDA enabled", 400)
        ranks = [{"checksums": self.weights.checksums()}]
        return web.json_response({"success": True, "message": "", "ranks": ranks})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.weight_version})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200)


def experts_of(router: RouterShape, tokens: Sequence[int]) -> NDArray[np.int32]:
    """The fake routers' choices [R, layers, top_k], different for every token and layer; layer 0 is dense, so all 0."""
    tokens_R, layers, places = np.ix_(tokens, range(router.num_layers), range(router.top_k))
    ids = (7 * tokens_R + 3 * layers + places) % router.num_experts
    return np.where(layers == 0, 0, ids).astype(np.int32)


def _reply(success: bool, message: str, status: int | None = None) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=status or (200 if success else 400))


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.close()
    return web.Response(status=500)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    return spans
