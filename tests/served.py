"""A small server of OpenAI's completions protocol over the transformers engine, whose answers can be made to fail.

The protocol as ``vllm serve`` speaks it (token ids in and out, prompt log-probabilities) or, with ``extensions=False``, as
others do. What is tested with it is what no real server does on demand: errors, refusals, odd answers. Tests with the real
``vllm serve`` are in ``test_vllm_server.py``, with :class:`Faults` between the engine and it.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener
from urllib.request import Request as HTTPRequest

from xcompress.engines.base import Draw, Request
from xcompress.engines.hf import HFEngine

Answer = tuple[int, Any, dict[str, str]]


class Faults:
    """What stands before a server: counts requests, keeps the bodies, and fails those that ``fault`` says.

    Attributes:
        fault: called with a body and how often it has come before; a status to answer with, or None to let it through.
    """

    def __init__(self, answer: Callable[[str, Any, dict[str, str]], Answer]) -> None:
        self.answer = answer
        self.fault: Callable[[dict[str, Any], int], int | None] = lambda body, before: None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_a_time = 0
        self._running = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        """The answer to a request."""
        if body is None:
            return self.answer(path, body, headers)
        key = json.dumps(body, sort_keys=True)
        with self._lock:
            before = self._seen[key]
            self._seen[key] += 1
            self.bodies.append(body)
            self.headers.append(headers)
            self._running += 1
            self.most_at_a_time = max(self.most_at_a_time, self._running)
        try:
            status = self.fault(body, before)
            if status is not None:
                return status, {"error": {"message": f"made to fail with {status}"}}, {"Retry-After": "0.01"}
            return self.answer(path, body, headers)
        finally:
            with self._lock:
                self._running -= 1


@contextmanager
def listening(answer: Callable[[str, Any, dict[str, str]], Answer]) -> Iterator[str]:
    """A server on the loopback; gives its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            status, content, headers = answer(self.path, body, dict(self.headers))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def forward_to(base_url: str) -> Callable[[str, Any, dict[str, str]], Answer]:
    """Answers of another server."""
    opener = build_opener(ProxyHandler({}))

    def answer(path: str, body: Any, headers: dict[str, str]) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        url = base_url.removesuffix("/v1") + path
        kept = {name: value for name, value in headers.items() if name in {"Content-Type", "Authorization"}}
        try:
            with opener.open(HTTPRequest(url, data, kept), timeout=300) as response:
                return response.status, response.read(), {}
        except HTTPError as error:
            return error.code, error.read(), {}

    return answer


class Served:
    """The protocol over an engine."""

    def __init__(self, engine: HFEngine, name: str, extensions: bool = True, limit: int | None = None) -> None:
        self.engine = engine
        self.name = name
        self.extensions = extensions
        self.limit = limit
        self._lock = threading.Lock()  # the model serves one at a time

    def __call__(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        """The answer to a request."""
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name, "max_model_len": self.limit}]}, {}
        if path != "/v1/completions":
            return 404, {"error": {"message": f"no such path {path}"}}, {}
        with self._lock:
            return self._complete(body)

    def _complete(self, body: dict[str, Any]) -> Answer:
        tokenizer = self.engine.tokenizer
        own = {"top_k", "min_p", "stop_token_ids", "return_token_ids", "ignore_eos", "prompt_logprobs", "allowed_token_ids"}
        if not self.extensions and own & set(body):
            return 400, {"error": {"message": f"unknown fields {sorted(own & set(body))}"}}, {}
        if body["model"] != self.name:
            return 404, {"error": {"message": f"the model {body['model']} does not exist"}}, {}
        given = body["prompt"]
        prompt = tuple(given if isinstance(given, list) else tokenizer(given)["input_ids"])
        only = body.get("allowed_token_ids")
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        if only or body.get("echo"):
            text = (*prompt, *(only or (5,)))
            scored = self.engine.token_logprobs([(text[:1], text[1:])])[0]
            choice: dict[str, Any] = {"text": "", "finish_reason": "length", "token_ids": only}
            if only:
                choice["logprobs"] = {"token_logprobs": scored[-1:]}
                inner = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], scored[:-1], strict=True)]
                choice["prompt_logprobs"] = [None, *inner] if "prompt_logprobs" in body else None
            else:
                choice["logprobs"] = {"token_logprobs": [None, *scored]}
            return 200, {"choices": [choice], "usage": usage}, {}
        draw = Draw(body["temperature"], body["top_p"], body.get("seed", 0))
        stop, limit = tuple(body.get("stop", ())), body["max_tokens"]
        request = Request(prompt, (draw,), limit, stop, body.get("repetition_penalty", 1.0))
        ((got,),) = self.engine.generate([request])
        tokens = list(got.tokens)
        logprobs = [got.logprob_sum / max(1, len(tokens))] * len(tokens)
        if got.finish_reason == "stop" and not any(end in tokenizer.decode(tokens) for end in stop):
            tokens, logprobs = [*tokens, min(self.engine.stop_ids)], [*logprobs, -0.5]
        choice = {"text": got.text, "finish_reason": got.finish_reason}
        names = [tokenizer.decode([token]) for token in tokens]
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": names}
        if self.extensions:
            choice["token_ids"] = tokens
        return 200, {"choices": [choice], "usage": {**usage, "completion_tokens": len(tokens)}}, {}
