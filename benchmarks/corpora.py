"""Two corpora as .jsonl for `qkflow compare`, from the files in which they are passed around.

    python benchmarks/corpora.py medline OUT.jsonl abstracts.jsonl.xz ...
    python benchmarks/corpora.py web OUT.jsonl FOLDER

`medline` is a title and an abstract a document. `web` is heterogeneous on purpose: at most 1.3M characters each of C4,
OpenWebText, forums and chats (NLTK's web text), newswire (Reuters), edited prose (Brown) and film reviews, shuffled.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

PART = 1_300_000
"""Characters of each part of `web`, at most."""


def medline(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for record in map(json.loads, lines(path)):
            body = "\n".join(part["text"] for part in record["abstract"] if part["text"])
            if body:
                yield f"{record['title']}\n{body}"


def web(folder: Path) -> Iterator[str]:
    parts = [
        lines(folder / "exl3_c4.utf8.xz"),
        [json.loads(line)["text"] for line in lines(folder / "owt_passages_1000.jsonl")],
        [passage for text in zipped(folder / "nltk_webtext.zip", ".txt") for passage in passages(text)],
        [json.loads(line)["body"] for line in lines(folder / "reuters21578.jsonl.xz")],
        [re.sub(r"/\S+", "", text).strip() for text in zipped(folder / "brown.zip", "")],
        list(zipped(folder / "movie_reviews.zip", ".txt")),
    ]
    rng, chosen = random.Random(0), []
    for part in parts:
        texts, taken = [text for text in part if text and text.strip()], 0
        rng.shuffle(texts)
        for text in texts:
            if taken + len(text) <= PART:
                chosen.append(text)
                taken += len(text)
    rng.shuffle(chosen)
    yield from chosen


def lines(path: Path) -> list[str]:
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return data.decode().split("\n")[:-1]


def zipped(path: Path, ending: str) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            plain = name.endswith(ending) and not name.endswith("/") and "README" not in name
            if plain and (ending or re.fullmatch(r".*/c[a-z]\d\d", name)):
                yield archive.read(name).decode("latin-1")


def passages(text: str, lines: int = 40) -> Iterator[str]:
    rows = text.splitlines()
    for start in range(0, len(rows), lines):
        yield "\n".join(rows[start : start + lines])


if __name__ == "__main__":
    kind, out, *sources = sys.argv[1:]
    texts = medline([Path(source) for source in sources]) if kind == "medline" else web(Path(sources[0]))
    with open(out, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
