"""The remote engine: any server that speaks OpenAI's completions protocol (``vllm serve``, or a router before several).

Prompts go out as token ids, so the server sees exactly the tokens that every other engine sees; where it only takes text, the
number of prompt tokens that it counts is compared with ours. Requests run side by side, are tried again with a growing pause,
and one that fails for good leaves the others alone (:class:`xcompress.engines.base.RowErrors`). Every answer is kept in a
journal, so nothing is asked for twice: not after an interruption, and not when failed requests are asked for again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, build_opener
from urllib.request import Request as HTTPRequest

from xcompress import checkpoint
from xcompress.engines.base import Generation, Progress, Request, RowErrors, check_length, text_until
from xcompress.engines.journal import Journal
from xcompress.engines.vllm import check_beams, check_temperature, window
from xcompress.prompts import start_token
from xcompress.schema import UsageError
from xcompress.settings import Settings
from xcompress.store import digest

log = logging.getLogger(__name__)
_PAUSE = 0.5  # seconds before the second attempt; doubled each time
_LONGEST_PAUSE = 30.0
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # worth another attempt
_MISCONFIGURED = {401, 403, 404, 405}  # the same for every request
PROMPTS = ("ids", "text")


class _Failed(Exception):
    """One request, for good."""


class _Unreachable(_Failed):
    """Nobody answered at all."""


class OpenAIEngine:
    """Text generation by a server. Made by :func:`open_engine`, where the arguments are explained."""

    name = "openai"
    reproducible = False  # what runs beside a request on the server, and with which kernels, is not known here

    def __init__(
        self,
        folder: Path,
        addresses: Sequence[str],
        served: Mapping[str, str],
        prompts: str,
        extensions: bool,
        max_context: int | None,
        concurrency: int,
        attempts: int,
        timeout_seconds: float,
        api_key: str | None,
        journal: Path | None,
    ) -> None:
        self.folder = folder
        self.tokenizer: Any = checkpoint.load_tokenizer(folder)
        self.stop_ids = checkpoint.stop_ids(self.tokenizer, folder)
        self.prompts, self.extensions = prompts, extensions
        self.concurrency, self.attempts, self.timeout = concurrency, attempts, timeout_seconds
        self._api_key = api_key
        name = checkpoint.model_name(folder)
        self.places, longest = self._find(addresses, name, served.get(name))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        limits = [n for n in (max_context, window(config), longest) if n]
        self.max_context = min(limits) if limits else 4096
        # Answers of another checkpoint under the same name must not be taken for this one's.
        key = digest([checkpoint.fingerprint(folder), sorted({model for _, model in self.places}), prompts, extensions])
        self._journal = None if journal is None else Journal(journal / f"{name.replace('/', '--')}-{key}.jsonl")
        self._start = start_token(self.tokenizer)

    # ---- the contract

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[list[Generation]]:
        """See :class:`xcompress.engines.base.Engine`. Every draw is a request of its own.

        Raises:
            RowErrors: some requests have failed for good; the others are in the journal.
            UsageError: no server answers, or it does not do what it was asked.
        """
        for request in requests:
            check_length(request, self.max_context)
            if request.repetition_penalty != 1.0 and not self.extensions:
                raise UsageError(
                    "a repetition penalty is not part of OpenAI's protocol; set engine.extensions=true, or engine=vllm"
                )
        rows = [(at, request, draw) for at, request in enumerate(requests) for draw in request.draws]
        bodies = [
            {
                **self._prompt(request.prompt),
                "max_tokens": request.max_new_tokens,
                "temperature": draw.temperature,
                "top_p": draw.top_p,
                "n": 1,
                "logprobs": 1,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                **({"seed": draw.seed} if draw.temperature else {}),
                **({"stop": list(request.stop)} if request.stop else {}),
                **(self._neutral(request.repetition_penalty) if self.extensions else {}),
            }
            for _, request, draw in rows
        ]
        answers = self._all(bodies, [at for at, _, _ in rows], progress)
        results: list[list[Generation]] = [[] for _ in requests]
        for (at, request, _), answer in zip(rows, answers, strict=True):
            results[at].append(self._generation(request, answer))
        return results

    def token_logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See :class:`xcompress.engines.base.Engine`; the server repeats the prompt with the log-probabilities of its tokens.

        Raises:
            RowErrors, UsageError: as :meth:`generate`.
        """
        for context, continuation in pairs:
            if not context or not continuation:
                raise ValueError("context and continuation must both hold at least one token")
            check_length(Request(tuple(context), (), len(continuation)), self.max_context)
        bodies = [self._scoring(context, continuation) for context, continuation in pairs]
        answers = self._all(bodies, list(range(len(pairs))), None)
        found = []
        for (context, continuation), answer in zip(pairs, answers, strict=True):
            logprobs = answer["logprobs"][len(context) : len(context) + len(continuation)]
            if len(logprobs) != len(continuation) or None in logprobs:
                raise UsageError(
                    "the server gives no log-probabilities of prompt tokens (echo); set engine=hf or scoring.rivals=false"
                )
            found.append(self._finite(logprobs))
        return found

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """See :class:`xcompress.engines.base.Engine`."""
        return [math.fsum(logprobs) for logprobs in self.token_logprobs(pairs)]

    # ---- what is sent

    def _prompt(self, ids: Sequence[int]) -> dict[str, Any]:
        if self.prompts == "ids":
            return {"prompt": list(ids)}
        # A server puts the start token in front of a text itself; that it does is seen from the number it counts.
        rest = list(ids[1:] if ids and ids[0] == self._start else ids)
        return {"prompt": self.tokenizer.decode(rest, skip_special_tokens=False, clean_up_tokenization_spaces=False)}

    def _neutral(self, repetition_penalty: float) -> dict[str, Any]:
        """vLLM's further values, so that nothing comes from the model's own generation file."""
        return {
            "top_k": 0,
            "min_p": 0.0,
            "min_tokens": 0,
            "repetition_penalty": repetition_penalty,
            "stop_token_ids": sorted(self.stop_ids),
            "ignore_eos": True,  # the end token is among stop_token_ids
            "return_token_ids": True,
        }

    def _scoring(self, context: Sequence[int], continuation: Sequence[int]) -> dict[str, Any]:
        common = {"n": 1, "temperature": 0.0, "max_tokens": 1, "logprobs": 1}
        if not self.extensions:
            return {**self._prompt([*context, *continuation]), "echo": True, **common}
        # As in the vLLM engine: the last token is the only one allowed to follow.
        prompt = [*context, *continuation[:-1]]
        more = {"prompt_logprobs": 0} if len(continuation) > 1 else {}
        kept = {
            "allowed_token_ids": [continuation[-1]],
            "ignore_eos": True,
            "return_token_ids": True,
            "repetition_penalty": 1.0,
        }
        return {**self._prompt(prompt), **common, **kept, **more}

    # ---- what comes back

    def _read(self, body: Mapping[str, Any], reply: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """What is kept of a reply: tokens (null without vLLM's extension), text, log-probabilities, finish reason."""
        choice = reply["choices"][0]
        counted = (reply.get("usage") or {}).get("prompt_tokens")
        if counted is not None and counted != prompt_tokens:
            raise UsageError(
                f"the server counts {counted} prompt tokens where the tokenizer in {self.folder} gives {prompt_tokens}: another"
                " tokenizer, or another start token (engine.prompts=ids sends the tokens themselves)"
            )
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if logprobs is None:
            raise UsageError("the server gives no log-probabilities; they are stored with every text, so it cannot be used")
        tokens = choice.get("token_ids")
        if "allowed_token_ids" in body:
            prompt = body["prompt"]
            scored = choice.get("prompt_logprobs") or [None] * prompt_tokens
            inner = [
                None if entry is None else entry[str(token)]["logprob"] for token, entry in zip(prompt, scored, strict=True)
            ]
            if tokens != body["allowed_token_ids"]:
                raise UsageError("the server did not keep to the one token it was allowed; set engine.extensions=false")
            logprobs = [*inner, *logprobs]
        elif self.extensions and tokens is None:
            raise UsageError("the server does not know vLLM's return_token_ids; set engine.extensions=false")
        elif not self.extensions and not body.get("echo"):
            names = (choice.get("logprobs") or {}).get("tokens") or []
            if choice.get("finish_reason") == "stop" and names and names[-1] in ("", self.tokenizer.eos_token):
                logprobs = logprobs[:-1]
        return {
            "tokens": tokens,
            "text": choice.get("text") or "",
            "logprobs": logprobs,
            "finish_reason": choice.get("finish_reason"),
            "drawn": (reply.get("usage") or {}).get("completion_tokens") or len(logprobs),
        }

    def _generation(self, request: Request, answer: Mapping[str, Any]) -> Generation:
        tokens, logprobs, reason = answer["tokens"], list(answer["logprobs"]), str(answer["finish_reason"])
        if tokens is None:  # the text alone: its tokens are those that it has here
            text = str(answer["text"])
            ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            if tokens and reason == "stop" and tokens[-1] in self.stop_ids:
                tokens, logprobs = tokens[:-1], logprobs[:-1]
            text, ids = text_until(self.tokenizer, tokens, request.stop), tuple(tokens)
        return Generation(text, ids, reason, math.fsum(self._finite(logprobs)))

    def _finite(self, logprobs: Sequence[float | None]) -> list[float]:
        found = [math.nan if value is None else float(value) for value in logprobs]
        if not all(map(math.isfinite, found)):
            raise UsageError(
                "the server gives log-probabilities that are no numbers; its model overflows, or its dtype is wrong"
            )
        return found

    # ---- asking

    def _all(self, bodies: Sequence[dict[str, Any]], prompts: Sequence[int], progress: Progress | None) -> list[dict[str, Any]]:
        """The answers to all; ``prompts`` says which request (of the caller's) each belongs to."""
        keys = [digest(body) for body in bodies]
        found = {key: answer for key in keys if self._journal is not None and (answer := self._journal.get(key)) is not None}
        failed: dict[int, _Failed] = {}
        wanted = {key: at for at, key in reversed(list(enumerate(keys))) if key not in found}
        pool = ThreadPoolExecutor(self.concurrency)
        # Draws of one prompt go to one server, which has its beginning in the prefix cache.
        waiting: dict[Future[dict[str, Any]], str] = {
            pool.submit(self._ask, bodies[at], prompts[at]): key for key, at in wanted.items()
        }
        try:
            for future in as_completed(waiting):
                key = waiting[future]
                try:
                    answer = found[key] = future.result()
                except _Failed as error:
                    failed[wanted[key]] = error
                    continue
                if self._journal is not None:
                    self._journal.put(key, answer)
                if progress is not None:
                    progress(answer["drawn"])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        if failed and len(failed) == len(waiting) and all(isinstance(error, _Unreachable) for error in failed.values()):
            raise UsageError(f"no answer from {', '.join(url for url, _ in self.places)}: {next(iter(failed.values()))}")
        if failed:
            raise RowErrors({prompts[at]: str(error) for at, error in sorted(failed.items())})
        return [found[key] for key in keys]

    def _ask(self, body: dict[str, Any], prompt: int) -> dict[str, Any]:
        """One request, with its attempts; where several servers have the model, each attempt goes to the next."""
        for attempt in range(self.attempts):
            url, model = self.places[(prompt + attempt) % len(self.places)]
            last = attempt + 1 == self.attempts
            pause = min(_LONGEST_PAUSE, _PAUSE * 2**attempt)
            try:
                reply = self._send(f"{url}/completions", {"model": model, **body})
                expected = len(body["prompt"]) if self.prompts == "ids" else self._counted(body["prompt"])
                return self._read(body, reply, expected)
            except HTTPError as error:
                said = f"HTTP {error.code}: {_message(error)}"
                if error.code in _MISCONFIGURED:
                    raise UsageError(f"{url} refuses every request ({said}){self._key_hint(error.code)}") from None
                if error.code not in _AGAIN or last:
                    raise _Failed(said) from None
                pause = max(pause, _retry_after(error))
            except (URLError, HTTPException, OSError) as error:
                if last:
                    raise _Unreachable(str(getattr(error, "reason", error)) or type(error).__name__) from None
            except (KeyError, IndexError, TypeError, ValueError) as error:
                if last:
                    raise _Failed(f"an answer that is not understood ({type(error).__name__}: {error})") from None
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _counted(self, text: str) -> int:
        """Tokens of a prompt sent as text, with the start token that the server adds."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) + (self._start is not None)

    def _send(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        with _opener(url).open(HTTPRequest(url, data, headers), timeout=self.timeout) as response:
            return json.loads(response.read())

    def _find(self, addresses: Sequence[str], name: str, served: str | None) -> tuple[list[tuple[str, str]], int | None]:
        """The servers that have the model, each with its name there, and the longest text that all of them take.

        Raises:
            UsageError: a server does not answer, or none has the model.
        """
        places, limits, known = [], [], []
        for address in addresses:
            url = address.rstrip("/")
            try:
                models = self._send(f"{url}/models")["data"]
                names = [str(model["id"]) for model in models]
            except HTTPError as error:
                raise UsageError(f"{url}/models: HTTP {error.code}: {_message(error)}{self._key_hint(error.code)}") from None
            except (URLError, HTTPException, OSError) as error:
                why = getattr(error, "reason", error)
                raise UsageError(f"no server answers at {url} ({why}); start one: vllm serve {self.folder}") from None
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{url}/models is not the list of models of an OpenAI-compatible server") from None
            known += names
            for model in models:
                own = str(model["id"])
                same = own == served if served else own in {name, str(self.folder)} or Path(own).name == name
                if same:
                    places.append((url, own))
                    limits.append(model.get("max_model_len"))
        if not places:
            raise UsageError(
                f"none of the servers has {served or name}; they have {', '.join(known) or 'nothing'}"
                f" (engine.served={{{name}: NAME}} says what it is called there)"
            )
        return places, min((int(limit) for limit in limits if limit), default=None)

    def _key_hint(self, code: int) -> str:
        return "; the key is taken from the variable that engine.api_key_variable names" if code in {401, 403} else ""


def _message(error: HTTPError) -> str:
    """What the server says, in one line."""
    try:
        text = error.read(4000).decode(errors="replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        parsed = json.loads(text)
        found = parsed.get("error", parsed)
        text = str(found.get("message", found)) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or str(error.reason)


def _retry_after(error: HTTPError) -> float:
    value = error.headers.get("Retry-After", "")
    return min(float(value), _LONGEST_PAUSE) if value.replace(".", "", 1).isdecimal() else 0.0


_direct = threading.local()


def _opener(url: str) -> OpenerDirector:
    """No proxy to this machine itself, whatever the environment says; one opener a thread."""
    host = urlsplit(url).hostname or ""
    local = host == "localhost" or host.startswith("127.") or host == "::1"
    kept: dict[bool, OpenerDirector] = _direct.__dict__.setdefault("openers", {})
    if local not in kept:
        kept[local] = build_opener(ProxyHandler({})) if local else build_opener()
    return kept[local]


def check(settings: Settings) -> None:
    """What can be refused before anything is asked.

    Raises:
        UsageError: a setting makes no sense, or the method needs what the protocol does not have.
    """
    check_beams(settings, "openai")
    check_temperature(settings.generation.temperature)
    engine = settings.engine
    if settings.execution.get("name") == "ray":
        raise UsageError(
            "engine=openai needs no actors: set execution=local; engine.concurrency says how many requests run at a time"
        )
    _addresses(engine.get("base_url"))
    if engine.get("prompts", "ids") not in PROMPTS:
        raise UsageError(f"engine.prompts={engine.get('prompts')} is not known; choose from {', '.join(PROMPTS)}")
    if engine.get("prompts") == "text" and engine.get("extensions", True) and settings.scoring.rivals:
        raise UsageError(
            "engine.prompts=text scores prompts by echo: set engine.extensions=false, too (or scoring.rivals=false)"
        )
    for key in ("concurrency", "attempts"):
        if not isinstance(engine.get(key, 1), int) or engine.get(key, 1) < 1:
            raise UsageError(f"engine.{key} must be a whole number of 1 or more, not {engine.get(key)!r}")


def _addresses(base_url: Any) -> list[str]:
    found = [base_url] if isinstance(base_url, str) else list(base_url or [])
    for url in found:
        parts = urlsplit(str(url))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"engine.base_url={url} is no address like http://localhost:8000/v1")
        if parts.username or parts.password:
            raise UsageError(
                "engine.base_url must not hold a password (it is stored with the run); see engine.api_key_variable"
            )
    if not found:
        raise UsageError("engine=openai needs engine.base_url, for example http://localhost:8000/v1")
    return [str(url) for url in found]


def open_engine(
    folder: Path,
    dtype: str,
    device: str,
    base_url: str | Sequence[str],
    served: Mapping[str, str] | None = None,
    prompts: str = "ids",
    extensions: bool = True,
    max_context: int | None = None,
    concurrency: int = 32,
    attempts: int = 5,
    timeout_seconds: float = 600.0,
    api_key_variable: str = "OPENAI_API_KEY",
    journal: str | None = None,
) -> OpenAIEngine:
    """The engine of a model folder on servers (``configs/engine/openai.yaml``).

    Args:
        folder: the model's tokenizer and configuration (its weights are not read here).
        dtype: of the server's weights, as far as you know it; it is recorded, not checked.
        device: of no meaning here.
        base_url: of one server or several; each model is looked for in all of them.
        served: names that the servers give to models, where they are neither the hub name nor the folder's.
        prompts: "ids", or "text" for servers that take no token ids.
        extensions: whether the server knows vLLM's further fields.
        max_context: prompt plus continuation, in tokens; None takes the lowest limit of model and servers.
        concurrency: requests under way at a time.
        attempts: of one request.
        timeout_seconds: for one answer.
        api_key_variable: name of the environment variable that holds the key, if one is needed.
        journal: folder of the journals; None keeps none.

    Raises:
        UsageError: a server does not answer, or none has the model.
    """
    return OpenAIEngine(
        folder,
        _addresses(base_url),
        served or {},
        prompts,
        extensions,
        max_context,
        concurrency,
        attempts,
        timeout_seconds,
        os.environ.get(api_key_variable) if api_key_variable else None,
        None if journal is None else Path(journal),
    )
