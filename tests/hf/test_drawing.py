"""Models, batches and settings drawn from seeds, over ranks beside one process."""

from unittest import mock

import pytest

from hf_burst.hf.parts import shared_beginnings
from tests.support.drawing import Runs, compare, draw

# documents of a packed row with the same words and other images, once computed with the first one's image
OTHER_IMAGES = 18


@pytest.mark.slow
def test_what_is_drawn_is_exact() -> None:
    runs = Runs()
    try:
        exact = 0
        for seed in range(30):
            case = draw(seed)
            sentence = compare(case, runs.of(case))
            assert sentence == "exact" or "cannot be had" in sentence, (case, sentence)
            exact += sentence == "exact"
        assert exact >= 25
    finally:
        runs.close()


def test_a_wrong_pass_is_noticed() -> None:
    """As if all texts had the same images."""
    case = draw(OTHER_IMAGES)
    with (
        mock.patch.object(shared_beginnings, "same_for_every_text", return_value=True),
        pytest.raises(AssertionError, match=r"loss .* for"),
    ):
        compare(case, lambda function, *arguments: [function(0, 1, *arguments)])
