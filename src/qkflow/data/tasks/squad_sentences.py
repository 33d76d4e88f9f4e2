"""SQuAD as classification: does this sentence of the text answer the question?

    when  was  it  built  ?  <question>  the  tower  was  built  in  1889  .  <ask>   ->   yes
                                                                     ^^^^ rationale: the answer

Every question gives two instances: the sentence with its answer, and another sentence of the same text, drawn at random
(none if the text has one sentence). Small models learn this form, in contrast to `squad`, where they write the answer.
Sentences without the answer have no rationale.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.squad import SquadExample, read_examples
from qkflow.data.tasks.vocab import ASK, QUESTION, build_vocabulary, encode_words, subsample
from qkflow.data.text.splits import SPLITS

LABELS = ("no", "yes")
MAX_LENGTH, MAX_VOCABULARY = 80, 16000
ANY_LENGTH = 1 << 30
"""Texts of all lengths are read: only sentences are limited."""
ENDS = (".", "?", "!")
MIN_WORDS = 5
"""Shorter sentences, such as initials with a full stop, are joined with the next one."""


def squad_sentences(path: Path, config: TaskConfig) -> Task:
    """Read a folder or file of SQuAD; files and articles are divided as for `squad`."""
    skipped = Counter[str]()
    examples, split_note = read_examples(path, config, ANY_LENGTH, skipped)
    chosen = {split: subsample(examples[split], config.limit(split), config.seed) for split in SPLITS}
    texts = (words for example in chosen["train"] for words in (example.context, example.question))
    vocabulary = build_vocabulary(texts, markers=(QUESTION, ASK), max_size=config.vocabulary or MAX_VOCABULARY)
    max_length = config.longest or MAX_LENGTH
    instances: dict[str, Any] = {}
    for split in SPLITS:
        rng = random.Random(f"sentences {split} {config.seed}")
        made = [item for example in chosen[split] for item in _instances(example, vocabulary, rng)]
        instances[split] = tuple(item for item in made if len(item.tokens) <= max_length)
        skipped[f"longer than {max_length} tokens"] += len(made) - len(instances[split])
    return Task(
        name="SQuAD sentences",
        kind="classification",
        words=tuple(vocabulary),
        classes=LABELS,
        **instances,
        skipped=skipped,
        notes=(split_note, "rationale: the answer in the sentence; sentences without it have none"),
    )


def sentence_ranges(words: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the word ranges [start, stop) of the sentences of a text.

    >>> sentence_ranges(("it", "stands", "in", "paris", ".", "it", "is", "made", "of", "iron"))
    [(0, 5), (5, 10)]
    """
    ranges, start = [], 0
    for position, word in enumerate(words, 1):
        if position == len(words) or (word in ENDS and position - start >= MIN_WORDS):
            ranges.append((start, position))
            start = position
    return ranges


def _instances(example: SquadExample, vocabulary: Mapping[str, int], rng: random.Random) -> Iterator[Instance]:
    first, stop = example.span
    ranges = sentence_ranges(example.context)
    with_answer = next((span for span in ranges if span[0] <= first and stop <= span[1]), None)
    if with_answer is None:
        return
    question = (*encode_words(example.question, vocabulary), vocabulary[QUESTION])
    others = [span for span in ranges if span != with_answer]
    for start, end in (with_answer, *([rng.choice(others)] if others else [])):
        tokens = (*question, *encode_words(example.context[start:end], vocabulary), vocabulary[ASK])
        has_answer = (start, end) == with_answer
        shift = len(question) - start
        yield Instance(
            tokens=tokens,
            label=int(has_answer),
            rationale=tuple(range(first + shift, stop + shift)) if has_answer else (),
            protected=(*range(len(question)), len(tokens) - 1),
            kind=example.source,
        )
