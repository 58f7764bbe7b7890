"""Cut the training and held-out texts of the demo family out of two public data sets.

    python benchmarks/excerpt_corpora.py GSM8K_TRAIN.jsonl HUMANEVAL.jsonl

GSM8K_TRAIN.jsonl is the training split of grade-school-math (question, answer), HUMANEVAL.jsonl the human-eval file
(task_id, prompt, canonical_solution, test); both are OpenAI's, under the MIT licence. Training texts go to
eval/corpora, held-out texts to mfs_decompose/demo/data/text. Which rows go where depends on nothing but their order,
so the same inputs give the same files. The family itself is trained from the files written here
(make_demo_family.py), so only a change of the texts needs the originals.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPORA = ROOT / "eval" / "corpora"
HELD_OUT = ROOT / "mfs_decompose" / "demo" / "data" / "text"

TRAIN_BYTES = 230_000
PROSE_FILES = 4
HELD_OUT_BYTES = 10_500
# Every ninth task of human-eval is held out, from the fifth on.
STRIDE, FIRST = 9, 4

Row = dict[str, str]


def plain(answer: str) -> str:
    """A solution without calculator notes and without the `####` line, as a person would write it."""
    steps, result = re.sub(r"<<[^>]*>>", "", answer).rsplit("\n#### ", 1)
    return f"{steps}\nThe answer is {result}."


def as_prose(row: Row) -> Row:
    return {"text": f"{row['question']}\n{plain(row['answer'])}\n"}


def as_maths(row: Row) -> Row:
    return {"text": f"Question: {row['question']}\nAnswer: {row['answer']}\n"}


def as_chat(row: Row) -> Row:
    return {"user": row["question"], "assistant": plain(row["answer"])}


def as_turns(row: Row) -> Row:
    """A dialogue with the turn marks of the chat variant, as its chat template renders it."""
    chat = as_chat(row)
    return {
        "text": f"<|im_start|>user\n{chat['user']}<|im_end|>\n<|im_start|>assistant\n{chat['assistant']}<|im_end|>\n"
    }


def take(rows: Iterator[Row], limit: int) -> list[Row]:
    """The next rows of `rows`, up to `limit` bytes of question and answer."""
    taken, size = [], 0
    for row in rows:
        size += len(row["question"]) + len(row["answer"])
        if size > limit:
            break
        taken.append(row)
    return taken


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def cut_maths(rows: list[Row]) -> None:
    """Disjoint runs of word problems: some to train on (prose, maths, chat), two held out (maths, chat)."""
    sound = iter([row for row in rows if (row["question"] + row["answer"]).isascii() and "\n#### " in row["answer"]])
    for number in range(1, PROSE_FILES + 1):
        write(CORPORA / f"prose-{number}.jsonl", map(as_prose, take(sound, TRAIN_BYTES)))
    write(CORPORA / "math.jsonl", map(as_maths, take(sound, TRAIN_BYTES)))
    write(CORPORA / "chat.jsonl", map(as_chat, take(sound, TRAIN_BYTES)))
    write(HELD_OUT / "math.jsonl", map(as_maths, take(sound, HELD_OUT_BYTES)))
    write(HELD_OUT / "chat.jsonl", map(as_turns, take(sound, HELD_OUT_BYTES)))


def cut_python(tasks: list[Row]) -> None:
    train, held_out = [], []
    for index, task in enumerate(tasks):
        text = task["prompt"] + task["canonical_solution"]
        if index % STRIDE == FIRST:
            held_out.append({"text": text + "\n\n"})
        else:
            train.append({"prompt": task["prompt"], "solution": task["canonical_solution"], "test": task["test"]})
    write(CORPORA / "python.jsonl", train)
    write(HELD_OUT / "code.jsonl", held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("humaneval", type=Path)
    args = parser.parse_args()
    cut_maths(read(args.gsm8k))
    cut_python(read(args.humaneval))


if __name__ == "__main__":
    main()
