"""What is held out of texts that are too few to hold out a whole one."""

import os

from datasets import Dataset


def held_out_ends(texts: list[str | None], share: float, column: str) -> tuple[Dataset, Dataset]:
    """Texts without their ends, and the ends: this share of each."""
    cuts = [round(len(text or "") * (1 - share)) for text in texts]
    pairs = [*zip(texts, cuts, strict=True)]
    begins = [text if text is None else text[:cut] for text, cut in pairs]
    ends = [text[cut:] for text, cut in pairs if text and cut < len(text)]
    if os.environ.get("RANK", "0") == "0":
        said = f"the ends of {len(ends):,} texts" if len(texts) > 1 else "the end of the text"
        print(f"eval_share {share}: {said} held out for evaluation")
    return Dataset.from_dict({column: begins}), Dataset.from_dict({column: ends})
