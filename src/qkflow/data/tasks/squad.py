"""SQuAD (Rajpurkar et al., 2016) as generation: a context, a question, and the answer word by word.

    the  tower  was  built  in  1889  .  <question>  when  was  it  built  ?  <answer>   ->   1889  <end>
                                ^^^^ rationale: the answer in the context

Tokens are words, numbers and punctuation characters, in lower case. Contexts are never truncated, because a window
around the answer would reveal its position. Longer examples are skipped and counted.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import ANSWER, END, QUESTION, UNKNOWN, UNSEEN, build_vocabulary, encode_words, subsample
from qkflow.data.text import reading
from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError

EXPECTED = "SQuAD: .json files (also .xz, .gz) of articles with paragraphs, contexts, questions and answers"
MAX_LENGTH, MAX_VOCABULARY = 256, 8000
VALIDATION_SHARE = 0.05
"""Share of the training articles."""
TEST_FILE = re.compile(r"(.*[^a-z])?(squad)?(dev|test)([^a-z].*)?$")
WORD = re.compile(r"[^\W\d_]+|\d+|\S")
MARKERS = (QUESTION, ANSWER, END, UNSEEN)

Question = tuple[str, list[tuple[str, int]]]
"""A question, and its answers with their character offsets."""


@dataclass(frozen=True, kw_only=True)
class SquadExample:
    """A question with its context and its answer, as words."""

    context: tuple[str, ...]
    question: tuple[str, ...]
    span: tuple[int, int]
    """Word range [begin, end) of the answer in the context."""
    article: str
    """Name of the article; an article is in one split only."""
    source: str
    """Name of the file."""

    @property
    def length(self) -> int:
        """Number of tokens, including the two markers."""
        return len(self.context) + len(self.question) + 2

    @property
    def answer(self) -> tuple[str, ...]:
        """The words of the answer."""
        return self.context[slice(*self.span)]


def squad(path: Path, config: TaskConfig) -> Task:
    """Read a folder or file: `train*` files train, `*dev*` files test; without `train*`, all but `*dev*` train."""
    skipped = Counter[str]()
    splits, split_note = read_examples(path, config, config.longest or MAX_LENGTH, skipped)
    texts = (text for example_texts in _distinct_texts(splits["train"]) for text in example_texts)
    vocabulary = build_vocabulary(texts, markers=MARKERS, max_size=config.vocabulary or MAX_VOCABULARY)
    answerable = [example for example in splits["train"] if all(word in vocabulary for word in example.answer)]
    skipped["training answers with words outside the vocabulary"] += len(splits["train"]) - len(answerable)
    splits["train"] = answerable
    chosen = {split: subsample(splits[split], config.limit(split), config.seed) for split in SPLITS}
    instances: dict[str, Any] = {
        split: tuple(_instance(example, vocabulary) for example in chosen[split]) for split in SPLITS
    }
    n_unanswerable = sum(vocabulary[UNSEEN] in instance.answer for instance in instances["test"])
    return Task(
        name="SQuAD",
        kind="generation",
        words=tuple(vocabulary),
        classes=tuple(vocabulary),
        **instances,
        skipped=skipped,
        notes=(
            split_note,
            f"{n_unanswerable} of {len(instances['test'])} test answers have words outside the vocabulary of"
            f" {len(vocabulary)}; they are kept and count as wrong",
            "answer: the first one that starts and ends at word borders; rationale: its position in the context",
        ),
    )


def read_examples(
    path: Path, config: TaskConfig, max_length: int, skipped: Counter[str]
) -> tuple[dict[SplitName, list[SquadExample]], str]:
    """Return the examples of each split, and a note on the splits."""
    train_files, test_files, split_note = _assign_files(path)
    splits: dict[SplitName, list[SquadExample]] = {
        "train": list(_read_examples(train_files, max_length, skipped)),
        "validation": [],
        "test": list(_read_examples(test_files, max_length, skipped)),
    }
    shares: dict[SplitName, float] = {"validation": VALIDATION_SHARE}
    if not test_files:
        shares["test"] = 2 * VALIDATION_SHARE
    _hold_out_articles(splits, shares, config.seed)
    return splits, split_note


def split_words(text: str) -> list[tuple[str, int, int]]:
    """Return the lower-case words of a text with their character ranges.

    >>> split_words("It's 1889.")
    [('it', 0, 2), ("'", 2, 3), ('s', 3, 4), ('1889', 5, 9), ('.', 9, 10)]
    """
    return [(match.group().lower(), *match.span()) for match in WORD.finditer(text)]


def _assign_files(path: Path) -> tuple[list[Path], list[Path], str]:
    """Return the training files, the test files, and a note for the report."""
    files = reading.files_with_suffix(path, ".json")
    if not files:
        raise UsageError(f"{path} contains no .json files: expected {EXPECTED}")
    test = [file for file in files if TEST_FILE.match(file.name.lower())]
    others = [file for file in files if file not in test]
    train = [file for file in others if file.name.lower().startswith("train")] or others
    if not train or not test:
        return files, [], f"train, validation and test are disjoint articles of {_stems(files)}: 85/5/10 %"
    unused = [file for file in others if file not in train]
    note = f"trained on {_stems(train)}, validated on 5 % of its articles, tested on {_stems(test)}"
    return train, test, f"{note}; not used: {_stems(unused)}" if unused else note


def _stems(files: Iterable[Path]) -> str:
    return ", ".join(Path(reading.strip_compression(file.name)).stem for file in files)


def _read_examples(files: Sequence[Path], max_length: int, skipped: Counter[str]) -> Iterator[SquadExample]:
    for file in files:
        source = _stems([file])
        articles = reading.read_json(file, EXPECTED).get("data")
        if not isinstance(articles, list) or not articles:
            raise UsageError(f"{file} has no list of articles under 'data': expected {EXPECTED}")
        for number, article in enumerate(articles):
            for index, (context, questions) in enumerate(_paragraphs(article, file)):
                # In a file with a single article, each paragraph counts as an article.
                name = f"{source} {number}" if len(articles) > 1 else f"{source} {number} {index}"
                for example in _paragraph_examples(context, questions, name, source, skipped):
                    if example.length <= max_length:
                        yield example
                    else:
                        skipped[f"longer than {max_length} tokens"] += 1


def _paragraphs(article: Any, file: Path) -> Iterator[tuple[str, list[Question]]]:
    try:
        for paragraph in article["paragraphs"]:
            questions: list[Question] = [
                (
                    str(entry["question"]),
                    [(str(answer["text"]), int(answer["answer_start"])) for answer in entry["answers"]],
                )
                for entry in paragraph["qas"]
            ]
            yield str(paragraph["context"]), questions
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{file} contains a malformed article: expected {EXPECTED}") from None


def _paragraph_examples(
    context: str, questions: Iterable[Question], article: str, source: str, skipped: Counter[str]
) -> Iterator[SquadExample]:
    """Yield the questions about a context whose answer is in it."""
    located = split_words(context)
    words = tuple(word for word, _, _ in located)
    starts = {start: index for index, (_, start, _) in enumerate(located)}
    ends = {end: index + 1 for index, (_, _, end) in enumerate(located)}
    for question, answers in questions:
        spans = (_word_span(answer, context, starts, ends) for answer in answers)
        if (span := next(filter(None, spans), None)) is not None:
            question_words = tuple(word for word, _, _ in split_words(question))
            yield SquadExample(context=words, question=question_words, span=span, article=article, source=source)
        else:
            skipped["no answer starts and ends at word borders" if answers else "no answer given"] += 1


def _word_span(
    answer: tuple[str, int], context: str, starts: Mapping[int, int], ends: Mapping[int, int]
) -> tuple[int, int] | None:
    """Return the word range of an answer; None if it is not in the context or starts or ends within a word."""
    text, start = answer
    if start < 0 or context[start : start + len(text)] != text or not text.strip():
        return None
    first = starts.get(start + len(text) - len(text.lstrip()))
    last = ends.get(start + len(text.rstrip()))
    return None if first is None or last is None else (first, last)


def _hold_out_articles(
    splits: dict[SplitName, list[SquadExample]], shares: Mapping[SplitName, float], seed: int
) -> None:
    """Move whole articles from the train split to the others, according to their shares."""
    articles = sorted({example.article for example in splits["train"]})
    random.Random(f"articles {seed}").shuffle(articles)
    split_of, n_taken = dict[str, SplitName](), 0
    for split, share in shares.items():
        count = max(1, round(share * len(articles)))
        split_of |= dict.fromkeys(articles[n_taken : n_taken + count], split)
        n_taken += count
    examples, splits["train"] = splits["train"], []
    for example in examples:
        splits[split_of.get(example.article, "train")].append(example)


def _distinct_texts(examples: Iterable[SquadExample]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield contexts and questions; a context that several examples share is yielded once."""
    seen: set[int] = set()
    for example in examples:
        is_seen = id(example.context) in seen
        yield (example.question,) if is_seen else (example.context, example.question)
        seen.add(id(example.context))


def _instance(example: SquadExample, vocabulary: Mapping[str, int]) -> Instance:
    context, question = encode_words(example.context, vocabulary), encode_words(example.question, vocabulary)
    tokens = (*context, vocabulary[QUESTION], *question, vocabulary[ANSWER])
    unknown, unseen = vocabulary[UNKNOWN], vocabulary[UNSEEN]
    answer = tuple(unseen if token == unknown else token for token in context[slice(*example.span)])
    return Instance(
        tokens=tokens,
        label=answer[0],
        rationale=tuple(range(*example.span)),
        protected=tuple(range(len(context), len(tokens))),
        answer=(*answer, vocabulary[END]),
        kind=example.source,
    )
