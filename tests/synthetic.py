"""A made-up run of any size in the form the analysis gets it, so that pages of hundreds of questions need no model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from pools import settings

from xcompress.forward import POOLINGS
from xcompress.pipeline import Collected
from xcompress.schema import Passage, Question

WORDS = re.findall(
    r"\w+",
    "river hill mill bridge castle market tower harbour valley church station garden school museum theatre library road lake"
    " founded built opened designed moved named became stood near under over between before after during known called small old"
    " famous local royal northern public first second last large several many early late century year town village county city",
)
NAMES = ("Ada Bell", "Otto Kern", "Mill Lane", "Lake Orla", "1887", "Tarn", "Port Ellis", "Nora Vance")


def text(draw: random.Random, words: int, name: str = "") -> str:
    """Sentences of random words; ``name`` stands somewhere in the middle."""
    chosen = [draw.choice(WORDS) for _ in range(words)]
    if name:
        chosen[words // 2] = name
    sentences = [" ".join(chosen[at : at + 12]).capitalize() + "." for at in range(0, words, 12)]
    return " ".join(sentences)


def make(root: Path, questions: int, passages: int = 10, candidates: int = 5, **texts: Any) -> Collected:
    """``questions`` questions with ``passages`` passages of about 100 words and ``candidates`` + 1 summaries of about 60.

    Args:
        texts: ``question``, ``summary``, ``prediction``, ``title``, ``passage``, ``answer``: put into the first question.
    """
    s = settings(f"generation.candidates={candidates}", "statistics.resamples=200", f"run_root={root}")
    axes: dict[str, list[Any]] = {
        "start_token": [False],
        "first_token": [True, False],
        "subspace": ["embedding"],
        "layer": ["0", "1", "2", "3", "normed"],
        "pooling": list(POOLINGS),
        "energy": [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999],
    }
    folder = root / "scores"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "axes.json").write_text(json.dumps({"axes": axes}))
    variants = 2 * 5 * len(POOLINGS) * 8
    draw = random.Random(7)
    asked: list[Question] = []
    rows: dict[str, list[dict[str, Any]]] = {"candidates": [], "scores": [], "rivals": [], "answers": []}
    for number in range(questions):
        first = number == 0
        name = draw.choice(NAMES)
        retrieved = [
            Passage(f"{draw.choice(WORDS).title()} {k}", text(draw, draw.randint(70, 130), name if draw.random() < 0.3 else ""))
            for k in range(passages)
        ]
        question = f"Which {draw.choice(WORDS)} of {draw.choice(WORDS)} number {number} was {draw.choice(WORDS)}?"
        if first:
            question = texts.get("question", question)
            retrieved[0] = Passage(texts.get("title", retrieved[0].title), texts.get("passage", retrieved[0].text))
        golds = (texts["answer"],) if first and "answer" in texts else () if number % 97 == 96 else (name,)
        asked.append(Question(f"q{number}", question, golds, tuple(retrieved), (retrieved[0].title,), "bridge"))
        easy = draw.random()
        for k in range(candidates + 1):
            blank = number % 89 == 88 and k == 1
            right = draw.random() < easy
            summary = "" if blank else text(draw, draw.randint(40, 80), name if right else "")
            prediction = name if right else draw.choice(["", "the old mill", name + " bridge", "no"])
            if first:
                summary, prediction = texts.get("summary", summary), texts.get("prediction", prediction)
            tokens = 0 if blank else len(summary.split()) + 1
            key = {"question_id": f"q{number}", "candidate": k}
            cut = draw.random() < 0.03
            rows["candidates"].append(
                {**key, "summary": summary, "compressor_tokens": 900 + tokens, "rounds": [_round(tokens, cut)]}
            )
            scored = not blank
            rows["scores"].append(
                {
                    **key,
                    "status": "ok" if scored else "blank",
                    "tokens": tokens,
                    "nll": draw.uniform(1, 4) if scored else None,
                    "scored_tokens": tokens,
                    "token_logprobs": [-3.0, -2.5] if scored else None,
                    "first_token": draw.randrange(20),
                    "ratio": [draw.random() / 50, draw.random() / 50] if scored else None,
                    "sps": [draw.uniform(500, 900) for _ in range(variants)] if scored else None,
                }
            )
            rows["rivals"].append(
                {
                    **key,
                    "long_logprobs": [-0.1, draw.uniform(-1, -0.05)] if scored else None,
                    "question_logprob_sum": draw.uniform(-60, -20),
                    "question_tokens": 12,
                    "context_tokens_removed": 0,
                    "longppl_forward_tokens": 1500,
                    "question_forward_tokens": 90,
                }
            )
            rows["answers"].append(_answer(key, "candidate", prediction, draw.uniform(-9, -0.1)))
        for source in ("raw_passages", "closed_book"):
            said = draw.choice([name, "the old mill"])
            rows["answers"].append(_answer({"question_id": f"q{number}", "candidate": None}, source, said, -1.0))
    health = {
        "unlabelled": sum(not question.answers for question in asked),
        "unusable_rows": [],
        "fewer_passages_than_asked": 0,
        "golds_not_matching_themselves": 0,
        "all_gold_titles_retrieved": questions,
        "with_gold_titles": questions,
        "answer_string_in_passages": questions // 2,
        "labelled": sum(bool(question.answers) for question in asked),
    }
    ratios = [{"status": "ok", "ratio": [draw.random() / 50, draw.random() / 50]} for _ in range(20)]
    return Collected(
        settings=s,
        root=root,
        questions=asked,
        health={"test": health},
        prepare_seconds=0.1,
        candidates=rows["candidates"],
        scores=rows["scores"],
        rivals=rows["rivals"],
        answers=rows["answers"],
        calibration_scores=ratios,
        stepwise=[],
        stepwise_answers=[],
        scores_folder=folder,
        identities={},
        shards={"candidates": ["a/0.parquet"]},
        work={"generate": [{"seconds": 9.0, "questions": questions, "tokens": 1000}]},
    )


def _round(tokens: int, cut: bool) -> dict[str, Any]:
    return {
        "new_tokens": tokens,
        "finish_reason": "length" if cut else "stop",
        "verdict": "complete",
        "tokens_removed": 0,
        "logprob_sum": -1.5 * tokens,
    }


def _answer(key: dict[str, Any], source: str, prediction: str, logprob: float) -> dict[str, Any]:
    return {
        **key,
        "source": source,
        "prediction": prediction,
        "prompt_tokens": 200,
        "new_tokens": 4,
        "finish_reason": "stop",
        "tokens_removed": 0,
        "logprob_sum": logprob,
    }
