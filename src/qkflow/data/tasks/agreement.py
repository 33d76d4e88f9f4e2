"""Subject-verb agreement from a small grammar, with zero to four nouns between the subject and its verb.

    near the guard the old author behind the skaters that the spies admire often      -> singular
                           ^^^^^^            ^^^^^^^          ^^^^
                           the head noun     two attractors

Only the head noun determines the label. `the`, adjectives and adverbs do not inflect, and the numbers of all nouns are
independent. A verb in an object clause agrees with its own subject; a verb in a subject clause, which would agree with
the head noun, is in the past tense. The position of the head noun varies, because a phrase with another noun can come
first. As in Marvin & Linzen's sentences, subjects and other nouns are disjoint sets, so that a one-layer model can find
the head noun.

| phrase        | example                                | position               | nouns |
|---------------|----------------------------------------|------------------------|-------|
| `prep`        | behind the guards                      | anywhere, repeatable   | 1     |
| `subject`     | that helped the guards                 | anywhere, at most one  | 1     |
| `object`      | that the guards admire                 | last                   | 1     |
| `bare`        | the guards admire                      | last                   | 1     |
| `object+prep` | that the guards near the spy admire    | last                   | 2     |
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from qkflow.data.tasks.base import Task, TaskConfig
from qkflow.data.tasks.prefixes import SPLIT_NOTE, Prefix, split_by_noun, split_prefix_task
from qkflow.data.text.splits import SPLITS, SplitName
from qkflow.errors import UsageError

Noun = tuple[str, str]
"""Singular and plural form."""
Chain = tuple[str, ...]
"""Phrases between a head noun and its verb."""


def _parse_nouns(words: str) -> tuple[Noun, ...]:
    """Parse `man/men author` into (man, men), (author, authors)."""
    pairs = (word.partition("/") for word in words.split())
    return tuple((singular, plural or f"{singular}s") for singular, _, plural in pairs)


SUBJECTS = _parse_nouns(
    "author pilot surgeon farmer manager customer officer teacher senator consultant student lawyer"
    " man/men person/people child/children alumnus/alumni thief/thieves lady/ladies hero/heroes boss/bosses"
)
OTHERS = _parse_nouns(
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
OPENING_ADVERBS = ("yesterday", "today", "recently", "sometimes", "perhaps")
OPENINGS = ("", "adverb", "prep")
ADJECTIVE_RATE, ADVERB_RATE = 0.15, 0.25
"""Probability of an adjective before a noun, and of an adverb at the end of the prefix."""

NOUNS_OF = {"prep": 1, "subject": 1, "object": 1, "bare": 1, "object+prep": 2}

MAX_ATTRACTORS = 4
SIZES: dict[SplitName, int] = {"train": 20000, "validation": 500, "test": 1000}
MAX_TRIES = 200
"""Draws for a new sentence before the grammar counts as exhausted."""
NOTES = (
    f"built-in grammar (ours): {len(SUBJECTS)} subject nouns, {len(OTHERS)} other nouns, 0 to {MAX_ATTRACTORS} of them"
    " between the subject and its verb, all numbers independent",
    "rationale: the subject's head noun",
)


def agreement(config: TaskConfig) -> Task:
    """Generate distinct sentences, balanced over 0, 1, .. 4 attractors and over singular and plural.

    >>> task = agreement(TaskConfig(train=100, test=20))
    >>> len(task.train), len(task.test), task.classes, task.train[2].kind
    (100, 20, ('singular', 'plural'), '2 attractors')
    """
    rng = random.Random(f"agreement {config.seed}")
    templates = [Template(opening=opening, chain=chain) for opening in OPENINGS for chain in _chains()]
    split_of = split_by_noun([(template.name, noun) for template in templates for noun, _ in SUBJECTS], config.seed)
    seen, prefixes = set[tuple[str, ...]](), dict[SplitName, list[Prefix]]()
    for split in SPLITS:
        frames: list[list[Frame]] = [[] for _ in range(MAX_ATTRACTORS + 1)]  # by number of attractors
        for template in templates:
            nouns = [noun for noun in SUBJECTS if split_of[template.name, noun[0]] == split]
            frames[template.attractors] += [(template, noun) for noun in nouns]
        limit = config.limit(split)
        prefixes[split] = [
            _new_sentence(rng, frames[number % len(frames)], number // len(frames) % 2, seen)
            for number in range(SIZES[split] if limit is None else limit)
        ]
    return split_prefix_task("agreement (built-in grammar)", prefixes, config, skipped={}, notes=(SPLIT_NOTE, *NOTES))


@dataclass(frozen=True, kw_only=True)
class Template:
    """A sentence template."""

    opening: str
    """Before the subject: nothing, an adverb or a prepositional phrase."""
    chain: Chain
    """Phrases between the subject and the verb."""

    @property
    def name(self) -> str:
        """Name of the template, used to split."""
        return " ".join((self.opening, "noun", *self.chain)).strip()

    @property
    def attractors(self) -> int:
        """Number of nouns between the head noun and the verb."""
        return sum(NOUNS_OF[phrase] for phrase in self.chain)


Frame = tuple[Template, Noun]


def _chains() -> list[Chain]:
    """Return all sequences of phrases with at most `MAX_ATTRACTORS` nouns."""
    bodies: list[Chain] = []
    for length in range(MAX_ATTRACTORS + 1):
        plain = ("prep",) * length
        bodies.append(plain)
        bodies.extend((*plain[:index], "subject", *plain[index + 1 :]) for index in range(length))
    ends: list[Chain] = [(), ("object",), ("bare",), ("object+prep",)]
    return [
        body + end
        for body in bodies
        for end in ends
        if sum(NOUNS_OF[phrase] for phrase in body + end) <= MAX_ATTRACTORS
    ]


def _new_sentence(rng: random.Random, frames: list[Frame], label: int, seen: set[tuple[str, ...]]) -> Prefix:
    for _ in range(MAX_TRIES):
        prefix = _sentence(rng, rng.choice(frames), label)
        if prefix.words not in seen:
            seen.add(prefix.words)
            return prefix
    raise UsageError(f"the built-in grammar has no more than {len(seen)} distinct sentences: request fewer instances")


@dataclass
class _Writer:
    """Builds a sentence phrase by phrase."""

    rng: random.Random
    nouns: list[Noun]
    """Unused nouns; each is used at most once."""
    words: list[str]

    def noun_phrase(self, noun: Noun | None = None, number: int | None = None) -> int:
        """Add `the (adjective) noun`; return the number of the noun."""
        noun = self.nouns.pop() if noun is None else noun
        number = self.rng.randrange(2) if number is None else number
        adjective = [self.rng.choice(ADJECTIVES)] if self.rng.random() < ADJECTIVE_RATE else []
        self.words += ["the", *adjective, noun[number]]
        return number

    def prepositional_phrase(self) -> None:
        """Add `behind the guards`."""
        self.words += self.rng.choice(PREPOSITIONS).split()
        self.noun_phrase()

    def phrase(self, phrase: str) -> None:
        """Add one phrase of a chain."""
        verb = self.rng.choice(VERBS)
        if phrase == "prep":
            self.prepositional_phrase()
        elif phrase == "subject":
            self.words += ["that", verb[2]]
            self.noun_phrase()
        else:
            self.words += [] if phrase == "bare" else ["that"]
            number = self.noun_phrase()
            if phrase == "object+prep":
                self.prepositional_phrase()
            self.words.append(verb[number])


def _sentence(rng: random.Random, frame: Frame, label: int) -> Prefix:
    template, noun = frame
    writer = _Writer(rng, rng.sample(OTHERS, MAX_ATTRACTORS + 1), [])
    if template.opening == "adverb":
        writer.words.append(rng.choice(OPENING_ADVERBS))
    elif template.opening == "prep":
        writer.prepositional_phrase()
    writer.noun_phrase(noun, label)
    head = len(writer.words) - 1
    for phrase in template.chain:
        writer.phrase(phrase)
    if rng.random() < ADVERB_RATE:
        writer.words.append(rng.choice(ADVERBS))
    count = template.attractors
    return Prefix(
        words=tuple(writer.words),
        label=label,
        head=head,
        noun=noun[0],
        template=template.name,
        kind=f"{count} attractor{'s' * (count != 1)}",
    )
