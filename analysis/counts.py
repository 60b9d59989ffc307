"""What happened to the rows: everything short, blank, cut off, unparsed, shortened or unlabelled is counted and shown."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.load import Pool
from xcompress.pipeline import Collected


def count(collected: Collected, pool: Pool) -> dict[str, Any]:
    """Counts of one run by where they arise; every count comes with what it is out of."""
    rounds = [round_ for row in collected.candidates for round_ in row["rounds"]]
    candidates = len(collected.candidates)
    distinct = len({(row["question_id"], row["summary"]) for row in collected.candidates})
    health = collected.health["test"]
    most = collected.settings.dataset.segment_size * collected.settings.compressor.max_rounds
    unseen = sum(len(question.passages) > most for question in collected.questions)
    return {
        "questions": {
            "used": len(pool.questions),
            "unlabelled (no gold answer: read, not in any mean)": health["unlabelled"],
            "rows that could not be used": len(health["unusable_rows"]),
            "with fewer passages than asked for": health["fewer_passages_than_asked"],
            "with passages that no compressor round saw (segment_size x max_rounds is less)": unseen,
            "gold answers that do not match themselves": health["golds_not_matching_themselves"],
            "whose gold titles are all among the passages": (
                f"{health['all_gold_titles_retrieved']} of {health['with_gold_titles']}"
            ),
            "with a gold answer somewhere in the passages": f"{health['answer_string_in_passages']} of {health['labelled']}",
        },
        "candidates": {
            "all": candidates,
            "distinct within their question": distinct,
            "blank": sum(not row["summary"].strip() for row in collected.candidates),
            "compressor rounds": len(rounds),
            "rounds cut off at the token limit": sum(r["finish_reason"] == "length" for r in rounds),
            "rounds without a usable evaluation": sum(r["verdict"] == "missing" for r in rounds),
            "rounds whose passages were shortened to fit": sum(r["tokens_removed"] > 0 for r in rounds),
        },
        "scores": {
            "without SPS (blank text)": sum(row["status"] != "ok" for row in collected.scores),
            "without NLL (one token, no start token)": sum(
                row["status"] == "ok" and row["nll"] is None for row in collected.scores
            ),
            "without LongPPL (no key token)": int(np.isnan(pool.longppl).sum()) if collected.rivals else "not computed",
            "LongPPL contexts shortened to fit": sum(row["context_tokens_removed"] > 0 for row in collected.rivals),
            "calibration questions": len(collected.calibration_scores),
        },
        "answers": {
            "all": len(collected.answers),
            "blank": sum(not row["prediction"] for row in collected.answers),
            "cut off at the token limit": sum(row["finish_reason"] == "length" for row in collected.answers),
            "raw-passage prompts shortened to fit": sum(
                row["tokens_removed"] > 0 for row in collected.answers if row["source"] == "raw_passages"
            ),
            "summaries shortened to fit the reader": sum(
                row["tokens_removed"] > 0 for row in collected.answers if row["source"] == "candidate"
            ),
        },
    }
