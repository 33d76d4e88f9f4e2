"""Subject-verb agreement from a small grammar: nouns between the subject and its verb, none to four of them.

    near the guard the old author behind the skaters that the spies admire often      -> singular
                           ^^^^^^            ^^^^^^^          ^^^^
                           the head noun     two attractors

Only the head noun tells the number: `the` fits both, adjectives and adverbs do not change, the numbers of all nouns are
drawn independently, a verb inside an object clause agrees with its own subject, and one inside a subject clause, which
would agree with the head noun, is in the past tense. The head noun's place is no help either: a phrase with a noun of
its own may come first. As in Marvin & Linzen's sentences, subjects and other nouns are two sets of words, so that a
model of one layer can find the head noun.

| phrase        | example                                | where                  | nouns |
|---------------|----------------------------------------|------------------------|-------|
| `prep`        | behind the guards                      | any number             | 1     |
| `subject`     | that helped the guards                 | one at most            | 1     |
| `object`      | that the guards admire                 | last                   | 1     |
| `bare`        | the guards admire                      | last                   | 1     |
| `object+prep` | that the guards near the spy admire    | last                   | 2     |
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import SPLIT, Prefix, parted_task, parts_by_noun
from qkflow.data.tasks.vocab import PARTS, Part
from qkflow.errors import UsageError

Noun = tuple[str, str]
"""Singular, plural."""
Chain = tuple[str, ...]
"""The phrases between a head noun and its verb."""


def _forms(words: str) -> tuple[Noun, ...]:
    """`man/men author` -> (man, men), (author, authors)."""
    pairs = (word.partition("/") for word in words.split())
    return tuple((one, many or f"{one}s") for one, _, many in pairs)


SUBJECTS = _forms(
    "author pilot surgeon farmer manager customer officer teacher senator consultant student lawyer"
    " man/men person/people child/children alumnus/alumni thief/thieves lady/ladies hero/heroes boss/bosses"
)
OTHERS = _forms(
    "guard driver chef architect skater dancer minister assistant executive parent"
    " woman/women fireman/firemen wolf/wolves spy/spies waitress/waitresses witness/witnesses"
)
VERBS = (
    ("admires", "admire", "admired"),
    ("likes", "like", "liked"),
    ("loves", "love", "loved"),
    ("hates", "hate", "hated"),
    ("knows", "know", "knew"),
    ("sees", "see", "saw"),
    ("helps", "help", "helped"),
    ("follows", "follow", "followed"),
    ("watches", "watch", "watched"),
    ("avoids", "avoid", "avoided"),
)
PREPOSITIONS = ("near", "behind", "beside", "next to", "in front of", "across from")
ADJECTIVES = ("tall", "old", "young", "quiet", "famous", "clever", "tired", "local")
ADVERBS = ("often", "usually", "never", "still", "certainly", "probably")
STARTS = ("yesterday", "today", "recently", "sometimes", "perhaps")
OPENINGS = ("", "adverb", "prep")
ADJECTIVE, ADVERB = 0.15, 0.25
"""How often a noun has an adjective, and the beginning ends in an adverb."""

NOUNS_OF = {"prep": 1, "subject": 1, "object": 1, "bare": 1, "object+prep": 2}

MOST = 4
"""Attractors, at most."""
SIZES: dict[Part, int] = {"train": 20000, "validation": 500, "test": 1000}
TRIES = 200
"""Draws for one more distinct sentence before the grammar counts as used up."""
NOTES = (
    f"built-in grammar (ours): {len(SUBJECTS)} subject nouns, {len(OTHERS)} other nouns, 0 to {MOST} of them between"
    " the subject and its verb, all numbers independent",
    "rationale: the subject's head noun",
)


def agreement(config: TaskConfig) -> Task:
    """The built-in grammar's task: as many sentences with 0, 1, .. 4 attractors, singular and plural alike, distinct.

    >>> task = agreement(TaskConfig(train=100, test=20))
    >>> len(task.train), len(task.test), task.classes, task.train[2].kind
    (100, 20, ('singular', 'plural'), '2 attractors')
    """
    source = random.Random(f"agreement {config.seed}")
    templates = [Template(opening=opening, chain=chain) for opening in OPENINGS for chain in _chains()]
    parts = parts_by_noun([(one.name, noun) for one in templates for noun, _ in SUBJECTS], config.seed)
    seen, made = set[tuple[str, ...]](), dict[Part, list[Prefix]]()
    for part in PARTS:
        frames: list[list[Frame]] = [[] for _ in range(MOST + 1)]
        for one in templates:
            frames[one.attractors] += [(one, noun) for noun in SUBJECTS if parts[one.name, noun[0]] == part]
        asked = config.train if part == "train" else config.test
        made[part] = [
            _distinct(source, frames[number % len(frames)], number // len(frames) % 2, seen)
            for number in range(SIZES[part] if asked is None else asked)
        ]
    return parted_task("agreement (built-in grammar)", made, config, skipped={}, notes=(SPLIT, *NOTES))


@dataclass(frozen=True, kw_only=True)
class Template:
    """What a sentence is built like."""

    opening: str
    """What comes before the subject: nothing, an adverb, a prepositional phrase."""
    chain: Chain
    """What comes after it, up to the verb."""

    @property
    def name(self) -> str:
        """What the split calls it."""
        return " ".join((self.opening, "noun", *self.chain)).strip()

    @property
    def attractors(self) -> int:
        """Nouns between the head noun and the verb."""
        return sum(NOUNS_OF[part] for part in self.chain)


Frame = tuple[Template, Noun]


def _chains() -> list[Chain]:
    """All rows of phrases after the head noun with up to `MOST` nouns."""
    bodies: list[Chain] = []
    for length in range(MOST + 1):
        plain = ("prep",) * length
        bodies.append(plain)
        bodies.extend((*plain[:place], "subject", *plain[place + 1 :]) for place in range(length))
    ends: list[Chain] = [(), ("object",), ("bare",), ("object+prep",)]
    return [body + end for body in bodies for end in ends if sum(NOUNS_OF[part] for part in body + end) <= MOST]


def _distinct(source: random.Random, frames: list[Frame], label: int, seen: set[tuple[str, ...]]) -> Prefix:
    for _ in range(TRIES):
        prefix = _sentence(source, source.choice(frames), label)
        if prefix.words not in seen:
            seen.add(prefix.words)
            return prefix
    raise UsageError(f"the built-in grammar gave {len(seen)} distinct sentences and no more: ask for fewer")


@dataclass
class _Writer:
    """Writes a sentence, each noun at most once: `nouns` are the other nouns, to be taken from the end."""

    source: random.Random
    nouns: list[Noun]
    words: list[str]

    def phrase(self, noun: Noun | None = None, number: int | None = None) -> int:
        """`the (adjective) noun`; gives the number of the noun."""
        noun = self.nouns.pop() if noun is None else noun
        number = self.source.randrange(2) if number is None else number
        adjective = [self.source.choice(ADJECTIVES)] if self.source.random() < ADJECTIVE else []
        self.words += ["the", *adjective, noun[number]]
        return number

    def prepositional(self) -> None:
        """`behind the guards`."""
        self.words += self.source.choice(PREPOSITIONS).split()
        self.phrase()

    def part(self, part: str) -> None:
        """One phrase of a chain."""
        verb = self.source.choice(VERBS)
        if part == "prep":
            self.prepositional()
        elif part == "subject":
            self.words += ["that", verb[2]]
            self.phrase()
        else:
            self.words += [] if part == "bare" else ["that"]
            number = self.phrase()
            if part == "object+prep":
                self.prepositional()
            self.words.append(verb[number])


def _sentence(source: random.Random, frame: Frame, label: int) -> Prefix:
    template, noun = frame
    writer = _Writer(source, source.sample(OTHERS, MOST + 1), [])
    if template.opening == "adverb":
        writer.words.append(source.choice(STARTS))
    elif template.opening == "prep":
        writer.prepositional()
    writer.phrase(noun, label)
    head = len(writer.words) - 1
    for part in template.chain:
        writer.part(part)
    if source.random() < ADVERB:
        writer.words.append(source.choice(ADVERBS))
    count = template.attractors
    return Prefix(
        words=tuple(writer.words),
        label=label,
        head=head,
        noun=noun[0],
        template=template.name,
        kind=f"{count} attractor{'s' * (count != 1)}",
    )
