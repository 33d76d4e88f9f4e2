"""Word lists of the needle tasks. Haystack words, keys and answers are disjoint.

All kinds and lengths share one vocabulary, so a model trained on one can be tested on another. In a sentence pattern, a
name in capitals stands for any word of that list.
"""

from __future__ import annotations

PERIOD = "."
DIGITS = tuple("0123456789")
CHARACTERS = (*DIGITS, *"abcdef")
"""Characters of an id. They are not haystack words: sentences use `one` and `some` instead of `a`."""


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LISTS = {
    "PERSON": _split_words("""
        baker farmer teacher sailor doctor painter miller driver porter gardener tailor singer pilot clerk judge
        student nurse mason printer weaver cook guide ranger writer
    """),
    "THING": _split_words("""
        basket letter ladder blanket bottle wagon hammer carpet mirror kettle candle saddle pencil barrel drum bucket
        chair table window door coat boot glove spoon plate knife rope brush clock book map box bag lamp
    """),
    "PLACE": _split_words("""
        market harbor bridge meadow kitchen station orchard village valley garden forest river library stable tower
        chapel square cellar field mill hill lake shore island school office yard barn
    """),
    "QUALITY": _split_words("""
        old young quiet heavy small large broken clean narrow wide bright dark warm cold empty full gentle busy plain
        tired green red blue brown tall short round strange common wooden
    """),
    "DID": _split_words("""
        carried painted repaired borrowed dropped washed sold bought moved lifted found lost kept hid opened closed
        counted cleaned wanted watched followed mended wrapped packed placed noticed forgot left
    """),
    "HOW": _split_words(
        "slowly quickly quietly often seldom gladly carefully soon later early together alone twice again"
    ),
    "TIME": _split_words("morning evening winter summer spring autumn night noon monday friday sunday"),
}
"""Haystack words, in addition to the lower-case words of the patterns."""

VARIED = (
    "the PERSON DID the THING in the PLACE .",
    "one TIME the QUALITY PERSON DID the QUALITY THING .",
    "near the PLACE there stood one QUALITY THING .",
    "HOW the PERSON and the PERSON DID the THING .",
    "the PLACE was QUALITY and QUALITY that TIME .",
    "before TIME the PERSON HOW DID the THING from the PLACE .",
    "the QUALITY THING that the PERSON DID was QUALITY .",
    "nobody in the PLACE DID the THING .",
    "after one QUALITY TIME , the PERSON went to the PLACE with the QUALITY THING .",
    "when the PERSON DID the THING , the other PERSON HOW DID some THING .",
)
"""Sentence patterns of a varied haystack (S-NIAH-2 and 3)."""

REPEATED = (
    "the road is long .",
    "the rain is soft .",
    "we wait and then we walk on .",
    "the night is quiet .",
    "so the day goes by .",
)
"""Sentences of a repetitive haystack (S-NIAH-1)."""

KEYS = _split_words("""
    lantern anchor compass violin falcon marble velvet copper saffron thistle juniper walnut acorn pebble glacier
    canyon comet meteor nebula quartz topaz amber ivory coral pearl emerald sapphire ruby garnet opal jasper onyx cedar
    maple willow poplar birch hazel laurel myrtle orchid tulip dahlia lilac jasmine clover fern moss heron osprey
    sparrow magpie raven badger otter beaver ferret marten lynx bison walrus dolphin turtle lobster
""")
"""Keys of the needles."""

ANSWERS = _split_words("""
    apricot banana cherry damson fig grape lemon mango melon olive orange papaya peach plum quince raisin tomato
    turnip radish carrot celery garlic onion pepper parsley fennel ginger cumin nutmeg cinnamon vanilla honey butter
    cheese yogurt biscuit pancake noodle pickle mustard vinegar sugar cocoa coffee banjo cello flute guitar harp oboe
    piano trumpet tuba zither accordion bugle cymbal fiddle lute mandolin organ viola whistle clarinet
""")
"""Answers that are words."""

NEEDLE = "the WHAT of KEY is ANSWER ."
QUESTION = "what is the WHAT of KEY ? it is ANSWER"
ANSWER_KINDS = ("number", "id", "word")

HAYSTACK = tuple(
    dict.fromkeys(
        [word for pattern in (*VARIED, *REPEATED) for word in pattern.split() if word not in LISTS]
        + [word for words in LISTS.values() for word in words]
    )
)
"""All haystack words."""

_FRAME = [word for word in f"{NEEDLE} {QUESTION}".split() if not word.isupper()]

WORDS = tuple(dict.fromkeys([*CHARACTERS, *_FRAME, *ANSWER_KINDS, *HAYSTACK, *KEYS, *ANSWERS]))
"""The vocabulary: one token per word."""
