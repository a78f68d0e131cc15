"""Long documents that every machine can have: the RFCs that Debian packs, cleaned, some of them held out.

    apt-get download doc-rfc-{std,std-proposed,old-std,informational,experimental,fyi-bcp}  # of non-free
    for package in doc-rfc-*.deb; do dpkg -x "$package" packages; done
    python recipes/rfcs.py packages rfcs

`rfcs/train.jsonl` and `rfcs/held_out.jsonl` have one document a line. RFCs revise each other, so a document is held out
only if hardly any of its sentences stands in another one that is written.
"""

import argparse
import gzip
import json
import re
import zlib
from collections import Counter
from pathlib import Path

PAGE_END = re.compile(r"\n*^.*\[Page [0-9ivx]+\][ \t]*\n+(?:\f\n*)?(?:^RFC \d+ .*\n)?\n*", re.MULTILINE)
BLANK = re.compile(r"\n(?:[ \t]*\n){2,}")
WORDS = 12  # in a row: what two documents share if one has copied from the other


def clean(text: str) -> str:
    """The text without feet and heads of pages, without the common margin, with at most one empty line in a row."""
    text = PAGE_END.sub("\n\n", text.replace("\r\n", "\n")).replace("\f", "\n")
    return BLANK.sub("\n\n", re.sub(r"^ {3}", "", text, flags=re.MULTILINE)).strip() + "\n"


def read(folder: Path, shortest: int) -> dict[int, str]:
    """The texts of at least so many characters, by their numbers."""
    texts = {}
    for path in sorted(folder.rglob("rfc*.txt.gz")):
        number = re.fullmatch(r"rfc0*(\d+)\.txt\.gz", path.name)
        if number and int(number[1]) not in texts and path.exists():
            text = clean(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))
            if len(text) >= shortest:
                texts[int(number[1])] = text
    return texts


def fingerprints(text: str) -> set[int]:
    """Hashes of every twelve words in a row; of every fourth of them, by the hash."""
    words = text.split()
    hashes = (zlib.crc32(" ".join(words[start : start + WORDS]).encode()) for start in range(len(words) - WORDS + 1))
    return {value for value in hashes if value % 4 == 0}


def choose(texts: dict[int, str], count: int, longest_first: int, most_shared: float) -> list[int]:
    """The numbers of the newest documents that have the length and share little with any other one."""
    marks = {number: fingerprints(text) for number, text in texts.items()}
    common = Counter(mark for own in marks.values() for mark in own)
    boilerplate = {mark for mark, times in common.items() if times > 20}  # licences and the like
    chosen: list[int] = []
    for number in sorted(texts, reverse=True):
        own = marks[number] - boilerplate
        if len(chosen) == count or len(texts[number]) < longest_first:
            continue
        shared = max((len(own & marks[other]) for other in texts if other != number), default=0)
        if own and shared <= most_shared * len(own):
            chosen.append(number)
    return chosen


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", type=Path, help="the folder into which the packages were unpacked")
    parser.add_argument("out", type=Path, help="the folder that is written")
    parser.add_argument("--shortest", type=int, default=150_000, help="characters of a document (default %(default)s)")
    parser.add_argument("--held-out", type=int, default=32, help="documents (default %(default)s)")
    parser.add_argument("--held-out-shortest", type=int, default=270_000, help="characters (default %(default)s)")
    parser.add_argument("--most-shared", type=float, default=0.05, help="of its text (default %(default)s)")
    options = parser.parse_args()
    texts = read(options.packages, options.shortest)
    if not texts:
        raise SystemExit(f"{options.packages} holds no RFC of {options.shortest:,} characters (rfc*.txt.gz).")
    held_out = choose(texts, options.held_out, options.held_out_shortest, options.most_shared)
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {"held_out": held_out, "train": sorted(set(texts) - set(held_out))}
    for name, numbers in parts.items():
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number in numbers:
                file.write(json.dumps({"name": f"rfc{number}", "text": texts[number]}) + "\n")
        print(
            f"{name}: {len(numbers)} documents, {sum(len(texts[number]) for number in numbers) / 1e6:.1f} M characters"
        )


if __name__ == "__main__":
    main()
