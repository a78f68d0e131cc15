"""Packed documents of random lengths, the same for every contender and on every rank."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Documents:
    """Lengths of packed documents, drawn so that every contender takes them.

    Args:
        shortest, longest (`int`): Tokens of a document. The logarithms between them are uniform.
        seed (`int`, defaults to 0): Another seed is another draw.
    """

    shortest: int
    longest: int
    seed: int = 0

    def bounds(self, length: int, multiple: int) -> tuple[int, ...]:
        """Cumulative boundaries of documents that fill `length` tokens.

        Every document has a multiple of `multiple` tokens, since some peers take no others. Documents of a short
        sequence are shorter in proportion, so that there are several.
        """
        scale = min(1.0, length / (4 * self.longest))
        draw, bounds = random.Random(length + self.seed), [0]
        while bounds[-1] < length:
            size = scale * math.exp(draw.uniform(math.log(self.shortest), math.log(self.longest)))
            whole = max(multiple, round(size / multiple) * multiple)
            bounds.append(min(length, bounds[-1] + whole))
        return tuple(bounds)
