"""Convert two public corpora to .jsonl for `qkflow compare`.

    python benchmarks/corpora.py medline OUT.jsonl abstracts.jsonl.xz ...
    python benchmarks/corpora.py web OUT.jsonl FOLDER

In `medline` each document is a title and an abstract. `web` is heterogeneous: up to 1.3M characters each of C4,
OpenWebText, forums and chats (NLTK's web text), newswire (Reuters), edited prose (Brown) and film reviews, shuffled.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 1_300_000
"""Maximum number of characters from each source of `web`."""


def medline(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for record in map(json.loads, read_lines(path)):
            body = "\n".join(section["text"] for section in record["abstract"] if section["text"])
            if body:
                yield f"{record['title']}\n{body}"


def web(folder: Path) -> Iterator[str]:
    sources = [
        read_lines(folder / "exl3_c4.utf8.xz"),
        [json.loads(line)["text"] for line in read_lines(folder / "owt_passages_1000.jsonl")],
        [passage for text in read_zip(folder / "nltk_webtext.zip", ".txt") for passage in passages(text)],
        [json.loads(line)["body"] for line in read_lines(folder / "reuters21578.jsonl.xz")],
        [re.sub(r"/\S+", "", text).strip() for text in read_zip(folder / "brown.zip", "")],
        list(read_zip(folder / "movie_reviews.zip", ".txt")),
    ]
    rng, chosen = random.Random(0), []
    for source in sources:
        texts, n_characters = [text for text in source if text and text.strip()], 0
        rng.shuffle(texts)
        for text in texts:
            if n_characters + len(text) <= MAX_CHARACTERS:
                chosen.append(text)
                n_characters += len(text)
    rng.shuffle(chosen)
    yield from chosen


def read_lines(path: Path) -> list[str]:
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return data.decode().split("\n")[:-1]


def read_zip(path: Path, suffix: str) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            is_text = name.endswith(suffix) and not name.endswith("/") and "README" not in name
            if is_text and (suffix or re.fullmatch(r".*/c[a-z]\d\d", name)):
                yield archive.read(name).decode("latin-1")


def passages(text: str, length: int = 40) -> Iterator[str]:
    lines = text.splitlines()
    for start in range(0, len(lines), length):
        yield "\n".join(lines[start : start + length])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=("medline", "web"))
    parser.add_argument("out", type=Path)
    parser.add_argument("sources", type=Path, nargs="+", help="files of medline, or the folder of web")
    args = parser.parse_args()
    texts = medline(args.sources) if args.corpus == "medline" else web(args.sources[0])
    with open(args.out, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
