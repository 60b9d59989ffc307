"""The process that holds a vLLM model, started by :mod:`xcompress.engines.vllm`: ``-m xcompress.engines.vllm_worker FD``.

Questions come in over the connection FD, one at a time; the process ends when the other end is closed, in the middle of a
question too, so that a killed run leaves no GPU occupied.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from xcompress.engines import vllm_gemma3


def main(descriptor: int) -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the asking process decides
    connection = Connection(descriptor)
    threading.Thread(target=_leave_with_the_other, args=(descriptor,), daemon=True).start()
    model: Any = None
    while True:
        try:
            what, items = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if what == "end":
            with contextlib.suppress(Exception):
                model.llm_engine.engine_core.shutdown()  # processes of its own give their memory back
            # Not sys.exit: what libraries do at the end can hang, and there is nothing to save.
            os._exit(0)
        answer: Any = None
        try:
            if what == "open":
                model = _open(items)
            elif what == "generate":
                answer = generate(model, items, connection)
            else:
                answer = score(model, items)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            connection.send(("refused", _first_line(error)))
        else:
            connection.send(("done", answer))


def _leave_with_the_other(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up alone is reported
    poll.poll()
    os._exit(0)


def _open(options: Mapping[str, Any]) -> Any:
    """The model. Nothing is taken from its generation file."""
    from vllm import LLM
    from vllm.platforms import current_platform

    device = options["device"]
    if current_platform.device_type != device:
        raise ValueError(
            f"it is built for {current_platform.device_type}, but the model's device is {device};"
            " set compressor.device and reader.device to auto, or engine=hf"
        )
    more: dict[str, Any] = {}
    if options["cache_gb"] is not None:
        more["kv_cache_memory_bytes"] = int(options["cache_gb"] * 2**30)
    if options["prefill_tokens"] is not None:
        more["max_num_batched_tokens"] = options["prefill_tokens"]
    if device == "cpu":
        # A seeded prompt that is computed in several steps ends vLLM on a CPU, whose generators cannot be set back. So whole
        # prompts only.
        more["enable_chunked_prefill"] = False
        more["max_num_batched_tokens"] = max(options["prefill_tokens"] or 2048, options["max_model_len"])
    if vllm_gemma3.NESTED in options["architectures"]:
        vllm_gemma3.register()
        more["hf_overrides"] = vllm_gemma3.text_part
    return LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        quantization=options["quantization"],
        tensor_parallel_size=options["tensor_parallel_size"],
        gpu_memory_utilization=options["gpu_memory_utilization"],
        max_num_seqs=options["max_num_seqs"],
        enable_prefix_caching=options["prefix_caching"],
        enforce_eager=options["enforce_eager"],
        generation_config="vllm",  # not the model's own file
        logprobs_mode="raw_logprobs",  # the model's own: before penalty, temperature and nucleus
        load_format="safetensors",
        trust_remote_code=False,
        seed=0,
        **more,
    )


def generate(
    model: Any, wanted: Sequence[Mapping[str, Any]], connection: Connection
) -> list[tuple[list[int], list[float], str]]:
    """Token ids (a stop token included), the model's log-probability of each, and "stop" or "length", for every request.

    Requests go through vLLM's steps themselves, so that finished ones can be told while others run.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = [{"prompt_token_ids": item["prompt"]} for item in wanted]
    parameters = [
        SamplingParams(
            n=1,
            temperature=item["temperature"],
            top_p=item["top_p"],
            top_k=0,  # all of these are vLLM's neutral values, said anyway
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=item["repetition_penalty"],
            seed=item["seed"] if item["temperature"] else None,
            max_tokens=item["max_tokens"],
            min_tokens=0,
            stop=item["stop"],
            stop_token_ids=item["stop_token_ids"],
            ignore_eos=True,  # the end token is among stop_token_ids
            logprobs=0,  # of the chosen token alone
            detokenize=bool(item["stop"]),
            skip_special_tokens=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for item in wanted
    ]
    outputs = _run(model, prompts, parameters, connection)
    answers = []
    for output in outputs:
        (one,) = output.outputs
        if one.finish_reason not in {"stop", "length"}:
            raise RuntimeError(f"a request ended with {one.finish_reason!r}")
        tokens = list(one.token_ids)
        logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, one.logprobs, strict=True)]
        answers.append((tokens, logprobs, one.finish_reason))
    return answers


def score(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    """Log-probability of every continuation token.

    The last one is asked for as the only token allowed to follow: a text may then fill the model's window, and a continuation
    of one token needs no other, so that its context comes from the prefix cache.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = [{"prompt_token_ids": [*context, *continuation[:-1]]} for context, continuation in pairs]
    parameters = [
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=[continuation[-1]],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if len(continuation) > 1 else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for _, continuation in pairs
    ]
    found = []
    for (context, continuation), output in zip(pairs, _run(model, prompts, parameters), strict=True):
        (one,) = output.outputs
        if list(one.token_ids) != continuation[-1:]:
            raise RuntimeError("vLLM did not keep to the token it was allowed")
        inner = zip(continuation[:-1], (output.prompt_logprobs or [])[len(context) :], strict=True)
        last = one.logprobs[0][continuation[-1]].logprob
        found.append([*(float(entry[token].logprob) for token, entry in inner), float(last)])
    return found


def _run(model: Any, prompts: Sequence[Any], parameters: Sequence[Any], connection: Connection | None = None) -> list[Any]:
    """The outputs in the order of the prompts; tells how many tokens were drawn as requests end."""
    engine = model.llm_engine
    for number, (prompt, wanted) in enumerate(zip(prompts, parameters, strict=True)):
        engine.add_request(str(number), prompt, wanted)
    outputs: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        drawn = 0
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
                drawn += len(output.outputs[0].token_ids)
        if drawn and connection is not None:
            connection.send(("progress", drawn))
    return [outputs[number] for number in range(len(prompts))]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # A refused setting: the first line counts the errors, the next says what is wrong, and then repeats all settings.
    told = [line.removeprefix("Value error, ").partition(" [type=")[0] for line in lines if line.startswith("Value error, ")]
    return (told or lines or [type(error).__name__])[0]


if __name__ == "__main__":
    main(int(sys.argv[1]))
