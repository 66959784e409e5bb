"""A server of OpenAI's completions that answers as a test wants."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "stub"
"""The name of the model that the stub serves."""


def completion(text: str | None, model: str = MODEL, first: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the body of a completion, and of a chat's answer at once."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop"}
    choice["message"] = {"role": "assistant", "content": text}
    if first is not None:
        choice["logprobs"] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": [first]}
    return {"id": "1", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing for a client that went away before its answer was written: a test reads what is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Stub:
    """A running stub. ``asked`` are the bodies of all questions; ``answer`` maps one to (status, body or bytes)."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, Any]], served: str) -> None:
        self.answer, self.asked, self.headers = answer, [], []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None: ...

            def reply(self, status: int, content: Any) -> None:
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Retry-After-Ms", "1")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.reply(200, {"object": "list", "data": [{"id": served, "object": "model"}]})
                else:
                    self.reply(404, {"error": {"message": "no such page"}})

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append(question)
                stub.headers.append(dict(self.headers))
                status, content = stub.answer(question)
                if status == 0:
                    # the connection is cut in the middle of an answer
                    self.connection.close()
                    self.close_connection = True
                    return
                self.reply(status, content)

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@contextmanager
def serving(answer: Callable[[dict[str, Any]], tuple[int, Any]], served: str = MODEL) -> Iterator[Stub]:
    """Yield a stub that answers with ``answer`` until the end of the block."""
    stub = Stub(answer, served)
    # the end of the block waits for the server to look whether it is to end
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.server.shutdown()
        stub.server.server_close()
