"""An OpenAI-compatible server for tests. Its replies are a function of the messages."""

import asyncio
import json
import threading

from aiohttp import web


class ChatServer:
    """Serves on loopback in a thread while the context is active; `requests` are (key, body)."""

    def __init__(self, reply):
        self.requests, self._reply = [], reply

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)))
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *exception):
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _serve(self, started):
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _answer(self, request):
        body = await request.json()
        self.requests.append((request.headers["Authorization"].removeprefix("Bearer "), body))
        message = {"role": "assistant", "content": self._reply(body["messages"])}
        completion = {"id": "1", "created": 1, "model": "policy"}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response(completion | {"object": "chat.completion", "choices": [choice]})
        choice = {"index": 0, "delta": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        parts = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        chunks = [json.dumps(completion | {"object": "chat.completion.chunk"} | part) for part in parts]
        text = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream")
