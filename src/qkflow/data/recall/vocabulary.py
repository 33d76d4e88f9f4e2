"""The words of the needle tasks: haystacks, keys and answers, of which none is in two of these lists.

One closed vocabulary serves all three kinds and all lengths, so that a model trained on one can be asked another. In
the patterns of sentences a name in capitals stands for any word of its list.
"""

from __future__ import annotations

PERIOD = "."
DIGITS = tuple("0123456789")
CHARACTERS = (*DIGITS, *"abcdef")
"""Of an id. No word of a haystack is one of these letters: `one` and `some` take the place of an article."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LISTS = {
    "PERSON": _words("""
        baker farmer teacher sailor doctor painter miller driver porter gardener tailor singer pilot clerk judge
        student nurse mason printer weaver cook guide ranger writer
    """),
    "THING": _words("""
        basket letter ladder blanket bottle wagon hammer carpet mirror kettle candle saddle pencil barrel drum bucket
        chair table window door coat boot glove spoon plate knife rope brush clock book map box bag lamp
    """),
    "PLACE": _words("""
        market harbor bridge meadow kitchen station orchard village valley garden forest river library stable tower
        chapel square cellar field mill hill lake shore island school office yard barn
    """),
    "QUALITY": _words("""
        old young quiet heavy small large broken clean narrow wide bright dark warm cold empty full gentle busy plain
        tired green red blue brown tall short round strange common wooden
    """),
    "DID": _words("""
        carried painted repaired borrowed dropped washed sold bought moved lifted found lost kept hid opened closed
        counted cleaned wanted watched followed mended wrapped packed placed noticed forgot left
    """),
    "HOW": _words("slowly quickly quietly often seldom gladly carefully soon later early together alone twice again"),
    "TIME": _words("morning evening winter summer spring autumn night noon monday friday sunday"),
}
"""What haystacks are made of, besides the words of the patterns themselves."""

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
"""Sentences of a haystack that does not repeat itself."""

DULL = (
    "the road is long .",
    "the rain is soft .",
    "we wait and then we walk on .",
    "the night is quiet .",
    "so the day goes by .",
)
"""Sentences of a haystack that does nothing else."""

KEYS = _words("""
    lantern anchor compass violin falcon marble velvet copper saffron thistle juniper walnut acorn pebble glacier
    canyon comet meteor nebula quartz topaz amber ivory coral pearl emerald sapphire ruby garnet opal jasper onyx cedar
    maple willow poplar birch hazel laurel myrtle orchid tulip dahlia lilac jasmine clover fern moss heron osprey
    sparrow magpie raven badger otter beaver ferret marten lynx bison walrus dolphin turtle lobster
""")
"""What needles tell something of."""

ANSWERS = _words("""
    apricot banana cherry damson fig grape lemon mango melon olive orange papaya peach plum quince raisin tomato
    turnip radish carrot celery garlic onion pepper parsley fennel ginger cumin nutmeg cinnamon vanilla honey butter
    cheese yogurt biscuit pancake noodle pickle mustard vinegar sugar cocoa coffee banjo cello flute guitar harp oboe
    piano trumpet tuba zither accordion bugle cymbal fiddle lute mandolin organ viola whistle clarinet
""")
"""What needles tell, where that is a word."""

NEEDLE = "the WHAT of KEY is ANSWER ."
QUESTION = "what is the WHAT of KEY ? it is ANSWER"
WHAT = {"number": "number", "id": "id", "word": "word"}
"""What an answer is called."""

HAYSTACK = tuple(
    dict.fromkeys(
        [word for pattern in (*VARIED, *DULL) for word in pattern.split() if word not in LISTS]
        + [word for words in LISTS.values() for word in words]
    )
)
"""Every word that a haystack can have."""

_FRAME = [word for word in f"{NEEDLE} {QUESTION}".split() if not word.isupper()]

WORDS = tuple(dict.fromkeys([*CHARACTERS, *_FRAME, *WHAT.values(), *HAYSTACK, *KEYS, *ANSWERS]))
"""All words, a token each."""
