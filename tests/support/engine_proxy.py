"""A proxy before an engine, for tests: it does what a test says before it passes a call on, or answers in its place."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

Hook = Callable[[int], Awaitable[int | None]]
"""From the number of a call of its path (from 0) to a status that is answered instead of passing it on, or None."""


class Proxy:
    """`before[path]` is asked for each call of that path."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.before: dict[str, Hook] = {}
        self.arrived: Counter[str] = Counter()
        self._session: aiohttp.ClientSession | None = None

    async def handle(self, request: web.Request) -> web.Response:
        body, path = await request.read(), request.path
        number, self.arrived[path] = self.arrived[path], self.arrived[path] + 1
        status = await self.before[path](number) if path in self.before else None
        if status is not None:
            return web.json_response({"success": status == 200, "message": "answered by the proxy"}, status=status)
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        assert self._session is not None
        call = self._session.request(request.method, self.target + path, data=body or None, headers=headers)
        try:
            async with call as answer:
                data = await answer.read()
                return web.Response(body=data, status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError as error:
            return web.json_response({"success": False, "message": str(error)}, status=502)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=0.5, access_log=None)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(trust_env=False, timeout=timeout) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()
