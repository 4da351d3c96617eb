"""More questions like those that the demo ships, about its held-out text: `python -m training.questions FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

from training.evaluate import questions
from training.rows import Corpus

DEMO = Path(__file__).parents[1] / "h2o_flexgen" / "data" / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where to write them, a JSON object a line")
    parser.add_argument("--kind", choices=("used", "once"), default="used", help="facts asked for before, or told once")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=177)
    args = parser.parse_args()
    corpus = Corpus(PreTrainedTokenizerFast.from_pretrained(DEMO), [])
    _, *texts = (DEMO / "heldout.txt").read_text(encoding="utf-8").split("\n\n")  # the first are stories, made anew
    corpus.held_text = [text.split("\n") for text in texts]
    with args.file.open("x", encoding="utf-8") as file:
        file.write(questions(corpus, Random(args.seed), args.kind, args.cases))


if __name__ == "__main__":
    main()
