"""A teacher behind an OpenAI-compatible endpoint: bounded concurrency, tries with growing pauses, replies untrusted.

Only the standard library: the protocol is one POST with a JSON body.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from parallel_r1.data.prompts import render_prompt
from parallel_r1.traces.store import Candidate
from parallel_r1.traces.teachers import Ask, Refusal, Teacher, TeacherError

MAX_REPLY_BYTES = 16 << 20
MAX_REFUSED_IN_A_ROW = 5
_WORTH_ANOTHER_TRY = (408, 409, 425, 429)
_HOPELESS = (401, 403, 404)


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server. url: up to and with `/v1`; api: `chat` sends the prompt as a user's message.

    extra: more fields of the request, such as {"top_p": 0.95}; a vLLM server whose model holds the tags as special
    tokens needs {"skip_special_tokens": false}. timeout_s: for one request; tries: of one request, with pauses of
    pause_s, twice that, and so on in between.
    """

    url: str
    model: str
    api: Literal["chat", "completions"] = "chat"
    key: str | None = None
    extra: Mapping[str, Any] | None = None
    timeout_s: float = 600.0
    tries: int = 6
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"base URL {self.url!r} is no address of a server; give one like http://127.0.0.1:8000/v1")

    def body(self, prompt: str, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The fields of one request."""
        asked = {"prompt": prompt} if self.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        common = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return {**asked, **common, **(self.extra or {})}

    def ask(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """(text, finished) of one request. Raises TeacherError, or _RefusedError for a request that is at fault."""
        for attempt in range(self.tries):
            try:
                return self._read(self._send(body))
            except _PassingError as error:
                cause, pause = str(error), max(error.pause, self.pause_s * 2**attempt * (1 + random.random()))
            if attempt + 1 < self.tries:
                time.sleep(min(pause, 60.0))
        raise TeacherError(f"{self.url} gave no answer in {self.tries} tries, the last time: {cause}")

    def _send(self, body: Mapping[str, Any]) -> bytes:
        path = "chat/completions" if self.api == "chat" else "completions"
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return reply.read(MAX_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(2000).decode("utf-8", "replace").split())
            cause = f"HTTP {error.code}: {said[:300]}"
            if error.code >= 500 or error.code in _WORTH_ANOTHER_TRY:
                raise _PassingError(cause, _seconds(error.headers.get("Retry-After"))) from None
            if error.code in _HOPELESS:
                raise TeacherError(f"{self.url} refuses every request, {cause}; check the URL, model, key") from None
            raise _RefusedError(cause) from None
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off in mid-reply
            raise _PassingError(f"{type(error).__name__}: {error}") from None

    def _read(self, reply: bytes) -> tuple[str, bool]:
        try:
            choice = json.loads(reply)["choices"][0]
            text = choice["message"]["content"] if self.api == "chat" else choice["text"]
            finished = choice["finish_reason"] == "stop"
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _PassingError(f"a reply that is no completion: {reply[:200]!r}") from None
        return (text if isinstance(text, str) else ""), finished


class _PassingError(Exception):
    """A failure that may pass. pause: seconds the server asks for."""

    def __init__(self, cause: str, pause: float = 0.0) -> None:
        super().__init__(cause)
        self.pause = pause


class _RefusedError(Exception):
    """The server will not answer this one request."""


def _seconds(header: str | None) -> float:
    return float(header) if header and header.strip().isdigit() else 0.0


class EndpointTeacher(Teacher):
    """Asks an endpoint, `concurrency` requests at a time."""

    def __init__(
        self, endpoint: Endpoint, template: str, max_tokens: int, temperature: float, concurrency: int = 16
    ) -> None:
        self.endpoint, self.template = endpoint, template
        self.max_tokens, self.temperature, self.concurrency = max_tokens, temperature, concurrency
        self._stop = threading.Event()

    def write(self, asks: Iterable[Ask]) -> Iterator[list[Candidate | Refusal]]:
        waiting, running, refused = iter(asks), set[Future[Candidate | Refusal]](), 0
        failure: TeacherError | None = None
        self._stop.clear()
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            while True:
                if failure is None:
                    fresh = islice(waiting, self.concurrency - len(running))
                    running |= {pool.submit(self._one, ask) for ask in fresh}
                if not running:
                    break
                # after a failure, what is under way may still come: it was paid for
                done, running = wait(running, return_when=FIRST_COMPLETED)
                found = []
                for future in done:
                    error = future.exception()
                    if isinstance(error, TeacherError):
                        failure = failure or error
                    else:
                        found.append(future.result())
                if found:
                    yield found
                for one in found:
                    refused = refused + 1 if isinstance(one, Refusal) else 0
                if refused >= MAX_REFUSED_IN_A_ROW and failure is None:
                    failure = TeacherError(
                        f"{self.endpoint.url} refused {refused} requests in a row, the last one with {one.cause}"
                    )
        finally:  # an interrupt does not wait for requests that are under way
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def _one(self, ask: Ask) -> Candidate | Refusal:
        if self._stop.is_set():
            raise TeacherError("stopped")
        prompt = render_prompt(self.template, ask.problem.question)
        try:
            text, finished = self.endpoint.ask(self.endpoint.body(prompt, self.max_tokens, self.temperature, ask.seed))
        except _RefusedError as error:
            return Refusal(ask.key, str(error))
        return Candidate(ask.problem.id, ask.index, text, finished)
