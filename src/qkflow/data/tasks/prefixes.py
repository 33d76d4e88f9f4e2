"""Beginnings of sentences that ask for a verb: what every reader of subject-verb agreement shares.

    the  author  next  to  the  guards  ...  is / are?        singular, because of 'author'

The last word asks: the model reads the beginning and says which number the verb has. A split never puts the same
noun of the same template in two parts, so that what is tested is not a pair learnt by heart; and every noun is the
subject of some training sentence, so that its number can be known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qkflow.data.tasks.base import Instance, Task, TaskConfig
from qkflow.data.tasks.vocab import PARTS, Part, read, subsample, vocabulary
from qkflow.errors import UsageError

NUMBERS = ("singular", "plural")
SPLIT = "split by template and subject noun, 70/10/20: no pair of the two is in two parts"
SLOTS: tuple[Part, ...] = ("test",) * 2 + ("validation",) + ("train",) * 7


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The words before a verb, and the noun it agrees with."""

    words: tuple[str, ...]
    """The words, in lower case."""
    label: int
    """0: singular, 1: plural."""
    head: int
    """The place of the subject's head noun."""
    noun: str
    """What that noun is called in the split."""
    template: str
    """What the sentence is built like."""
    kind: str
    """For a break-down; often the template."""


def parts_by_noun(pairs: Collection[tuple[str, str]], seed: int) -> dict[tuple[str, str], Part]:
    """A part for each (template, noun): 70 % train, 10 % validation, 20 % test of each template's nouns.

    Each template holds out other nouns than the one before it; a noun held out everywhere stays in training once.

    >>> parts = parts_by_noun([(template, noun) for template in "abc" for noun in "0123456789"], seed=0)
    >>> sorted(Counter(parts.values()).items())
    [('test', 6), ('train', 21), ('validation', 3)]
    """
    templates, nouns = sorted({template for template, _ in pairs}), sorted({noun for _, noun in pairs})
    random.Random(f"nouns {seed}").shuffle(nouns)
    wanted, parts = set(pairs), dict[tuple[str, str], Part]()
    for number, template in enumerate(templates):
        for rank, noun in enumerate(noun for noun in nouns if (template, noun) in wanted):
            parts[template, noun] = SLOTS[(rank + 3 * number) % len(SLOTS)]
    trained = {noun for (_, noun), part in parts.items() if part == "train"}
    for template, noun in sorted(wanted):
        if noun not in trained:
            parts[template, noun] = "train"
            trained.add(noun)
    return parts


def split_task(
    name: str, prefixes: Iterable[Prefix], config: TaskConfig, *, skipped: Mapping[str, int], notes: Sequence[str]
) -> Task:
    """A task from prefixes in any number and order: each distinct one once, split by template and noun."""
    distinct = dict[tuple[str, ...], Prefix]()
    repeated = 0
    for prefix in prefixes:
        repeated += prefix.words in distinct
        distinct.setdefault(prefix.words, prefix)
    parts = parts_by_noun({(one.template, one.noun) for one in distinct.values()}, config.seed)
    by_part: dict[Part, list[Prefix]] = {part: [] for part in PARTS}
    for prefix in distinct.values():
        by_part[parts[prefix.template, prefix.noun]].append(prefix)
    if empty := [part for part in PARTS if not by_part[part]]:
        kinds, nouns = (len({pair[place] for pair in parts}) for place in (0, 1))
        raise UsageError(
            f"{name}: {len(distinct)} sentences with {nouns} subject nouns in {kinds} templates leave nothing for"
            f" {empty[0]} when no noun of a template may be in two parts: give a set with more of both"
        )
    counts = {**skipped, "repeated beginnings": repeated}
    return parted_task(name, by_part, config, skipped=counts, notes=(SPLIT, *notes))


def parted_task(
    name: str,
    parts: Mapping[Part, Sequence[Prefix]],
    config: TaskConfig,
    *,
    skipped: Mapping[str, int],
    notes: Sequence[str],
) -> Task:
    """A task from prefixes that are split already."""
    counts, kept = Counter(skipped), dict[Part, tuple[Prefix, ...]]()
    for part in PARTS:
        short = [one for one in parts[part] if config.longest is None or len(one.words) <= config.longest]
        counts[f"longer than {config.longest} tokens"] += len(parts[part]) - len(short)
        kept[part] = subsample(short, config.train if part == "train" else config.test, config.seed)
    numbers = vocabulary((one.words for one in kept["train"]), most=config.vocabulary)
    instances = {part: tuple(_instance(one, numbers) for one in kept[part]) for part in PARTS}
    return Task(
        name=name,
        kind="classification",
        words=tuple(numbers),
        classes=NUMBERS,
        train=instances["train"],
        validation=instances["validation"],
        test=instances["test"],
        skipped={reason: count for reason, count in counts.items() if count},
        notes=tuple(notes),
    )


def _instance(prefix: Prefix, numbers: Mapping[str, int]) -> Instance:
    tokens = read(prefix.words, numbers)
    return Instance(tokens=tokens, label=prefix.label, rationale=(prefix.head,), kind=prefix.kind)
