"""Sentence prefixes that end before a verb, shared by all subject-verb agreement tasks.

    the  author  next  to  the  guards  ...  is / are?        singular, because of 'author'

The model reads the prefix and predicts the number of the verb. The same noun in the same template is never in two
splits, so memorized pairs do not help in the test. Every noun is the subject of some training sentence, so its number
can be learned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import build_vocabulary, encode_words, subsample
from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError

NUMBERS = ("singular", "plural")
SPLIT_NOTE = "split by template and subject noun, 70/10/20: no pair of the two is in two splits"
SPLIT_CYCLE: tuple[SplitName, ...] = ("test",) * 2 + ("validation",) + ("train",) * 7


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The words before a verb, and the noun that the verb agrees with."""

    words: tuple[str, ...]
    """The words, in lower case."""
    label: int
    """0: singular, 1: plural."""
    head: int
    """Position of the subject's head noun."""
    noun: str
    """Name of the noun, used to split."""
    template: str
    """Name of the sentence template, used to split."""
    kind: str
    """Category for result tables."""


def split_by_noun(pairs: Collection[tuple[str, str]], seed: int) -> dict[tuple[str, str], SplitName]:
    """Assign each (template, noun) to a split: 70 % train, 10 % validation, 20 % test of each template's nouns.

    Each template holds out different nouns. A noun that every template would hold out is kept in training once.

    >>> splits = split_by_noun([(template, noun) for template in "abc" for noun in "0123456789"], seed=0)
    >>> sorted(Counter(splits.values()).items())
    [('test', 6), ('train', 21), ('validation', 3)]
    """
    templates, nouns = sorted({template for template, _ in pairs}), sorted({noun for _, noun in pairs})
    random.Random(f"nouns {seed}").shuffle(nouns)
    all_pairs, splits = set(pairs), dict[tuple[str, str], SplitName]()
    for number, template in enumerate(templates):
        for rank, noun in enumerate(noun for noun in nouns if (template, noun) in all_pairs):
            splits[template, noun] = SPLIT_CYCLE[(rank + 3 * number) % len(SPLIT_CYCLE)]
    trained = {noun for (_, noun), split in splits.items() if split == "train"}
    for template, noun in sorted(all_pairs):
        if noun not in trained:
            splits[template, noun] = "train"
            trained.add(noun)
    return splits


def prefix_task(
    name: str, prefixes: Iterable[Prefix], config: TaskConfig, *, skipped: Mapping[str, int], notes: Sequence[str]
) -> Task:
    """Build a task from prefixes: drop duplicates, then split by template and noun.

    `prefixes` is read before `skipped`, so an iterator may still count what it skips.
    """
    distinct = dict[tuple[str, ...], Prefix]()
    n_repeated = 0
    for prefix in prefixes:
        n_repeated += prefix.words in distinct
        distinct.setdefault(prefix.words, prefix)
    split_of = split_by_noun({(prefix.template, prefix.noun) for prefix in distinct.values()}, config.seed)
    splits: dict[SplitName, list[Prefix]] = {split: [] for split in SPLITS}
    for prefix in distinct.values():
        splits[split_of[prefix.template, prefix.noun]].append(prefix)
    if empty := [split for split in SPLITS if not splits[split]]:
        n_templates, n_nouns = (len({pair[index] for pair in split_of}) for index in (0, 1))
        raise UsageError(
            f"{name}: {len(distinct)} sentences with {n_nouns} subject nouns in {n_templates} templates are too few: "
            f"{empty[0]} would be empty, because a noun of a template is in one split only; use a larger data set"
        )
    counts = {**skipped, "repeated prefixes": n_repeated}
    return split_prefix_task(name, splits, config, skipped=counts, notes=(SPLIT_NOTE, *notes))


def split_prefix_task(
    name: str,
    splits: Mapping[SplitName, Sequence[Prefix]],
    config: TaskConfig,
    *,
    skipped: Mapping[str, int],
    notes: Sequence[str],
) -> Task:
    """Build a task from prefixes that are already split."""
    counts, kept = Counter(skipped), dict[SplitName, tuple[Prefix, ...]]()
    for split in SPLITS:
        short = [prefix for prefix in splits[split] if config.longest is None or len(prefix.words) <= config.longest]
        counts[f"longer than {config.longest} tokens"] += len(splits[split]) - len(short)
        kept[split] = subsample(short, config.limit(split), config.seed)
    vocabulary = build_vocabulary((prefix.words for prefix in kept["train"]), max_size=config.vocabulary)
    instances: dict[str, Any] = {
        split: tuple(_instance(prefix, vocabulary) for prefix in kept[split]) for split in SPLITS
    }
    return Task(
        name=name,
        kind="classification",
        words=tuple(vocabulary),
        classes=NUMBERS,
        **instances,
        skipped=counts,
        notes=tuple(notes),
    )


def verb_position(sentence: Sequence[str], other: Sequence[str]) -> int:
    """Return the position of the first word that differs in a minimal pair; 0 if there is none."""
    pairs = zip(sentence, other, strict=False)
    return next((position for position, (word, other_word) in enumerate(pairs) if word != other_word), 0)


def _instance(prefix: Prefix, vocabulary: Mapping[str, int]) -> Instance:
    tokens = encode_words(prefix.words, vocabulary)
    return Instance(tokens=tokens, label=prefix.label, rationale=(prefix.head,), kind=prefix.kind)
