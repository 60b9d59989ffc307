"""lm-evaluation-harness's batched log-likelihood, in the environment that holds it; asked by benchmarks.external."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    about = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(about["threads"])
    from importlib.metadata import version

    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=about["model"], device="cpu", dtype="float32", batch_size=1)
    print(json.dumps({"version": version("lm_eval")}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model.batch_size_per_gpu = request["batch_size"]
        # The first token has no predecessor; the others are the continuation, as in our NLL.
        pairs = [(("", ""), ids[:1], ids[1:]) for ids in request["texts"]]
        wall, cpu = time.perf_counter(), time.process_time()
        found = model._loglikelihood_tokens(pairs, disable_tqdm=True)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps({**spent, "logprob_sums": [float(each[0]) for each in found]}), file=answers, flush=True)


if __name__ == "__main__":
    main()
