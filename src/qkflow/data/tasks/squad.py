"""SQuAD (Rajpurkar et al., 2016) as generation: a text, a question, and the answer word by word.

    the  tower  was  built  in  1889  .  <question>  when  was  it  built  ?  <answer>   ->   1889  <end>
                                ^^^^ rationale: where the answer stands

Words, numbers and single signs of punctuation, in lower case. A text is never cut: a window around the answer would
tell where it is. What is too long is skipped, and counted.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.data.tasks import jsonl
from qkflow.data.tasks.base import UNKNOWN, Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import ANSWER, END, PARTS, QUESTION, UNSEEN, Part, read, subsample, vocabulary
from qkflow.data.text import reading
from qkflow.errors import UsageError

EXPECTED = "SQuAD: .json files (also .xz, .gz) of articles with paragraphs, contexts, questions and answers"
LONGEST, VOCABULARY = 256, 8000
VALIDATION = 0.05
"""Of the training articles."""
TESTING = re.compile(r"(.*[^a-z])?(squad)?(dev|test)([^a-z].*)?$")
WORD = re.compile(r"[^\W\d_]+|\d+|\S")
MARKERS = (QUESTION, ANSWER, END, UNSEEN)

Question = tuple[str, list[tuple[str, int]]]
"""The question, and its answers with the characters where they begin."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with its text and its answer, as words."""

    context: tuple[str, ...]
    question: tuple[str, ...]
    span: tuple[int, int]
    """The answer's places in the context: from the first, up to but without the last."""
    article: str
    """What is never divided between parts."""
    source: str
    """The file it comes from."""

    @property
    def length(self) -> int:
        """Tokens, with the two markers."""
        return len(self.context) + len(self.question) + 2

    @property
    def answer(self) -> tuple[str, ...]:
        """The answer's words."""
        return self.context[slice(*self.span)]


def squad(path: Path, config: TaskConfig) -> Task:
    """The task of a folder (or one file): `train*` trains, `*dev*` tests; without `train*`, all but `*dev*` train."""
    training, testing, notes = _roles(path)
    skipped = Counter[str]()
    longest = config.longest or LONGEST
    pools: dict[Part, list[Example]] = {
        "train": list(_examples(training, longest, skipped)),
        "validation": [],
        "test": list(_examples(testing, longest, skipped)),
    }
    shares: dict[Part, float] = (
        {"validation": VALIDATION} if testing else {"validation": VALIDATION, "test": 2 * VALIDATION}
    )
    _divide(pools, shares, config.seed)
    texts = (text for one in _distinct(pools["train"]) for text in one)
    numbers = vocabulary(texts, markers=MARKERS, most=config.vocabulary or VOCABULARY)
    answerable = [one for one in pools["train"] if all(word in numbers for word in one.answer)]
    skipped["training answers with words outside the vocabulary"] += len(pools["train"]) - len(answerable)
    pools["train"] = answerable
    chosen = {part: subsample(pools[part], _most(config, part), config.seed) for part in PARTS}
    instances = {part: tuple(_instance(one, numbers) for one in chosen[part]) for part in PARTS}
    beyond = sum(numbers[UNSEEN] in one.answer for one in instances["test"])
    return Task(
        name="SQuAD",
        kind="generation",
        words=tuple(numbers),
        classes=tuple(numbers),
        train=instances["train"],
        validation=instances["validation"],
        test=instances["test"],
        skipped={reason: count for reason, count in skipped.items() if count},
        notes=(
            *notes,
            f"{beyond} of {len(instances['test'])} test answers have words outside the vocabulary of {len(numbers)}:"
            " they stay, and cannot be answered right",
            "answer: the first given one that begins and ends with a word; rationale: its place in the text",
        ),
    )


def words(text: str) -> list[tuple[str, int, int]]:
    """The words of a text in lower case, each with the characters where it begins and ends.

    >>> words("It's 1889.")
    [('it', 0, 2), ("'", 2, 3), ('s', 3, 4), ('1889', 5, 9), ('.', 9, 10)]
    """
    return [(found.group().lower(), *found.span()) for found in WORD.finditer(text)]


def _roles(path: Path) -> tuple[list[Path], list[Path], list[str]]:
    """The files to train on, those to test on, and what to say about it."""
    found = jsonl.files(path, ".json")
    if not found:
        raise UsageError(f"{path} has no .json files: expected {EXPECTED}")
    testing = [file for file in found if TESTING.match(file.name.lower())]
    others = [file for file in found if file not in testing]
    training = [file for file in others if file.name.lower().startswith("train")] or others
    if not training or not testing:
        note = f"train, validation and test are articles of {_names(found)}: 85/5/10 %, none shared"
        return found, [], [note]
    left = f"; not used: {_names(others)}" if (others := [file for file in others if file not in training]) else ""
    return (
        training,
        testing,
        [f"trained on {_names(training)}, validated on 5 % of its articles, tested on {_names(testing)}{left}"],
    )


def _names(files: Iterable[Path]) -> str:
    return ", ".join(Path(reading.bare(file.name)).stem for file in files)


def _examples(files: Sequence[Path], longest: int, skipped: Counter[str]) -> Iterator[Example]:
    for file in files:
        source = _names([file])
        articles = jsonl.document(file, EXPECTED).get("data")
        if not isinstance(articles, list) or not articles:
            raise UsageError(f"{file} has no list of articles under 'data': expected {EXPECTED}")
        for number, article in enumerate(articles):
            for place, (context, questions) in enumerate(_paragraphs(article, file)):
                # A file with one article only is a heap of separate texts.
                name = f"{source} {number}" if len(articles) > 1 else f"{source} {number} {place}"
                for one in _asked(context, questions, name, source, skipped):
                    if one.length <= longest:
                        yield one
                    else:
                        skipped[f"longer than {longest} tokens"] += 1


def _asked(
    context: str, questions: Iterable[Question], article: str, source: str, skipped: Counter[str]
) -> Iterator[Example]:
    """The questions about a text that have an answer in it."""
    spelled = words(context)
    text = tuple(word for word, _, _ in spelled)
    starts = {start: place for place, (_, start, _) in enumerate(spelled)}
    ends = {end: place + 1 for place, (_, _, end) in enumerate(spelled)}
    for question, answers in questions:
        spans = (_span(answer, context, starts, ends) for answer in answers)
        if (span := next(filter(None, spans), None)) is not None:
            asked = tuple(word for word, _, _ in words(question))
            yield Example(context=text, question=asked, span=span, article=article, source=source)
        else:
            skipped["no answer begins and ends with a word of the text" if answers else "no answer given"] += 1


def _paragraphs(article: Any, file: Path) -> Iterator[tuple[str, list[Question]]]:
    try:
        for paragraph in article["paragraphs"]:
            questions: list[Question] = [
                (
                    str(one["question"]),
                    [(str(answer["text"]), int(answer["answer_start"])) for answer in one["answers"]],
                )
                for one in paragraph["qas"]
            ]
            yield str(paragraph["context"]), questions
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{file} has an article that is not what it should be: expected {EXPECTED}") from None


def _span(
    answer: tuple[str, int], context: str, starts: Mapping[int, int], ends: Mapping[int, int]
) -> tuple[int, int] | None:
    """The answer's words in the context; none where it does not stand there, or begins or ends inside a word."""
    text, start = answer
    if start < 0 or context[start : start + len(text)] != text or not text.strip():
        return None
    first = starts.get(start + len(text) - len(text.lstrip()))
    last = ends.get(start + len(text.rstrip()))
    return None if first is None or last is None else (first, last)


def _divide(pools: dict[Part, list[Example]], shares: Mapping[Part, float], seed: int) -> None:
    """Move whole articles out of training, until each part has its share."""
    articles = sorted({one.article for one in pools["train"]})
    random.Random(f"articles {seed}").shuffle(articles)
    moved, taken = dict[str, Part](), 0
    for part, share in shares.items():
        count = max(1, round(share * len(articles)))
        moved |= dict.fromkeys(articles[taken : taken + count], part)
        taken += count
    everything, pools["train"] = pools["train"], []
    for one in everything:
        pools[moved.get(one.article, "train")].append(one)


def _distinct(examples: Iterable[Example]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The texts of examples, a context once however many questions it has."""
    seen: set[int] = set()
    for one in examples:
        yield (one.question,) if id(one.context) in seen else (one.context, one.question)
        seen.add(id(one.context))


def _most(config: TaskConfig, part: Part) -> int | None:
    return config.train if part == "train" else config.test


def _instance(one: Example, numbers: Mapping[str, int]) -> Instance:
    context, question = read(one.context, numbers), read(one.question, numbers)
    tokens = (*context, numbers[QUESTION], *question, numbers[ANSWER])
    spoken = context[slice(*one.span)]
    answer = tuple(numbers[UNSEEN] if word == numbers[UNKNOWN] else word for word in spoken)
    return Instance(
        tokens=tokens,
        label=answer[0],
        rationale=tuple(range(*one.span)),
        protected=tuple(range(len(context), len(tokens))),
        answer=(*answer, numbers[END]),
        kind=one.source,
    )
