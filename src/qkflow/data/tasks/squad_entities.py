"""SQuAD as classification: which entity of the sentence answers the question?

    when  was  the  <entity 7>  built  ?  <question>  the  <entity 7>  was  built  in  <number 2>  .  <ask>   ->   2
                                                                                       ^^^^^^^^^^ rationale

An entity is a run of rare words; a run with a digit is a number. Each gets a marker, the same one for the same words,
numbered at random in each instance: the model has to find the answer and to copy its number. Each training question
comes four times, with other numbers. Small models learn this form, in contrast to `squad`, where they write the
answer. Anonymous entities follow Hermann et al. 2015, https://arxiv.org/abs/1506.03340.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.squad import SquadExample, read_examples
from qkflow.data.tasks.vocab import ASK, QUESTION, build_vocabulary, encode_words, subsample
from qkflow.data.text.splits import SPLITS

MAX_LENGTH, MAX_VOCABULARY = 80, 2000
MAX_ENTITIES = 16
COPIES = 4
"""Instances per training question, which differ in the numbers of the markers."""
ANY_LENGTH = 1 << 30
"""Texts of all lengths are read: only sentences are limited."""
ENDS = (".", "?", "!")
MIN_WORDS = 5
"""Shorter sentences, such as initials with a full stop, are joined with the next one."""
_MARKERS = tuple(f"<{kind} {number}>" for kind in ("entity", "number") for number in range(MAX_ENTITIES))

Words = tuple[str, ...]


def squad_entities(path: Path, config: TaskConfig) -> Task:
    """Read a folder or file of SQuAD; files and articles are divided as for `squad`."""
    skipped = Counter[str]()
    examples, split_note = read_examples(path, config, ANY_LENGTH, skipped)
    texts = {words: None for example in examples["train"] for words in (example.context, example.question)}
    size = (config.vocabulary or MAX_VOCABULARY) + len(_MARKERS) + 4
    vocabulary = build_vocabulary(texts, markers=(*_MARKERS, QUESTION, ASK), max_size=size)
    max_length = config.longest or MAX_LENGTH
    instances: dict[str, Any] = {}
    for split in SPLITS:
        rng = random.Random(f"entities {split} {config.seed}")
        made = []
        copies = COPIES if split == "train" else 1
        for example in (example for example in examples[split] for _ in range(copies)):
            instance = _instance(example, vocabulary, rng)
            if isinstance(instance, str):
                skipped[instance] += 1
            elif len(instance.tokens) > max_length:
                skipped[f"longer than {max_length} tokens"] += 1
            else:
                made.append(instance)
        instances[split] = subsample(made, config.limit(split), config.seed)
    return Task(
        name="SQuAD entities",
        kind="classification",
        words=tuple(vocabulary),
        classes=tuple(map(str, range(MAX_ENTITIES))),
        **instances,
        skipped=skipped,
        notes=(split_note, "the sentence with the answer is given; rationale: the answer in it"),
    )


def sentence_ranges(words: Words) -> list[tuple[int, int]]:
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


def split_entities(words: Words, frequent: Collection[str]) -> list[tuple[bool, Words]]:
    """Divide words into entities (True, with all words of a run) and others (False, one by one).

    >>> split_entities(("the", "eiffel", "tower", "is", "tall"), {"the", "is", "tall"})
    [(False, ('the',)), (True, ('eiffel', 'tower')), (False, ('is',)), (False, ('tall',))]
    """
    parts: list[tuple[bool, Words]] = []
    for word in words:
        is_entity = any(map(str.isalnum, word)) and (word not in frequent or any(map(str.isdigit, word)))
        if is_entity and parts and parts[-1][0]:
            parts[-1] = (True, (*parts[-1][1], word))
        else:
            parts.append((is_entity, (word,)))
    return parts


def _instance(example: SquadExample, vocabulary: dict[str, int], rng: random.Random) -> Instance | str:
    """The instance of a question, or the reason why there is none."""
    first, stop = example.span
    start, end = next(((a, b) for a, b in sentence_ranges(example.context) if a <= first < b), (0, 0))
    if stop > end:
        return "answer in more than one sentence"
    question = split_entities(example.question, vocabulary)
    sentence = split_entities(example.context[start:end], vocabulary)
    entities = list(dict.fromkeys(words for is_entity, words in (*question, *sentence) if is_entity))
    if len(entities) > MAX_ENTITIES:
        return f"more than {MAX_ENTITIES} entities"
    answers, position = [], start
    for index, (is_entity, words) in enumerate(sentence):
        if is_entity and position < stop and first < position + len(words):
            answers.append((index, words, first <= position and position + len(words) <= stop))
        position += len(words)
    if [is_inside for _, _, is_inside in answers] != [True]:
        return "answer is not one entity"
    numbers = dict(zip(entities, rng.sample(range(MAX_ENTITIES), len(entities)), strict=True))

    def encode(parts: list[tuple[bool, Words]]) -> list[int]:
        return [
            vocabulary[_marker(words, numbers[words])] if is_entity else encode_words(words, vocabulary)[0]
            for is_entity, words in parts
        ]

    before = [*encode(question), vocabulary[QUESTION]]
    tokens = (*before, *encode(sentence), vocabulary[ASK])
    (index, words, _), *_ = answers
    return Instance(
        tokens=tokens,
        label=numbers[words],
        rationale=(len(before) + index,),
        protected=(*range(len(before)), len(tokens) - 1),
        kind=example.source,
    )


def _marker(words: Words, number: int) -> str:
    return f"<{'number' if any(map(str.isdigit, ''.join(words))) else 'entity'} {number}>"
