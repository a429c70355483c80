"""A small OpenAI-compatible server on loopback that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]]


class Server:
    """A loopback endpoint. reply: what it answers; asked: every body it got; most: requests it held at once."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        self.now = self.most = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append(body)
                    outer.paths.add(self.path)
                    outer.keys.add(self.headers.get("Authorization"))
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                try:
                    status, headers, content = reply(body)
                finally:
                    with lock:
                        outer.now -= 1
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def settle(self, seconds: float = 0.5) -> None:
        """Wait until no request has come for so long: those of a client that was killed may still be on their way."""
        seen = -1
        while seen != len(self.asked) or self.now:
            seen = len(self.asked)
            time.sleep(seconds)


def completion(text: str | None, finish: str = "stop") -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode()
