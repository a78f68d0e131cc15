"""Samples with images that are joined into a packed row."""

import pytest
import torch

from hf_burst import BurstCollator
from hf_burst.errors import BatchError
from tests.support import models
from tests.support.tiny_pictures import documents, seeing_batch
from tests.support.tiny_seeing import seeing_model


def collate(family: str, count: int = 3) -> dict:
    samples = documents(family)
    return BurstCollator(lambda rows: samples[rows[0]], packing=True)(list(range(count)))


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Gemma3", "Gemma4", "Mistral3", "Llava", "Kimi_K25"])
def test_samples_become_the_packed_batch(family: str) -> None:
    packed, wanted = collate(family), seeing_batch(family, "packed")
    assert bool(packed.pop("attention_mask").all())
    assert packed.keys() == wanted.keys()
    for name, value in wanted.items():
        found = packed[name]
        if name == "labels":  # the first token has no label of its own
            found, value = found[:, 1:], value[:, 1:]
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), name


@pytest.mark.parametrize("family", ["Idefics3", "LlavaNext"])
def test_rows_of_images_are_refused(family: str) -> None:
    with pytest.raises(BatchError, match="pixel_values of the samples is"):
        collate(family, 2)


def test_padding_and_samples_without_images() -> None:
    first = {
        "input_ids": torch.tensor([[5, 6, 7, 0, 0]]),
        "labels": torch.tensor([[5, 6, 7, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
    }
    second = {
        "input_ids": torch.tensor([[60, 8]]),
        "labels": torch.tensor([[60, 8]]),
        "mm_token_type_ids": torch.tensor([[1, 0]]),
        "pixel_values": torch.ones(4, 3),
    }
    row = BurstCollator(lambda rows: rows[0], packing=True)([first, second])
    assert row["input_ids"].tolist() == [[5, 6, 7, 60, 8]]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, 8]]
    assert row["mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 0]]
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert row["pixel_values"].shape == (4, 3)
    assert first["labels"].tolist() == [[5, 6, 7, -100, -100]], "what was given stays"


def test_several_rows_of_one_sample_are_refused() -> None:
    with pytest.raises(BatchError, match="2 rows of one sample"):
        BurstCollator(lambda rows: {"input_ids": torch.ones(2, 3)}, packing=True)([0])


TEXT = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}


def test_a_sample_without_labels_has_none_to_learn() -> None:
    row = BurstCollator(lambda rows: rows[0], packing=True)([TEXT, {"input_ids": torch.tensor([[8, 9]])}])
    assert row["labels"].tolist() == [[-100, 6, 7, -100, -100]]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"token_type_ids": torch.ones(1, 3)}, "Some samples have token_type_ids"),
        ({"position_ids": torch.ones(3, 1, 3)}, "Some samples have position_ids"),
        ({"completion_mask": torch.ones(1, 3)}, "holds completion_mask, which packing cannot join"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, "holds cu_seq_lens_q, which packing cannot join"),
        ({"target_sizes": torch.ones(1, 2)}, "holds target_sizes, which packing cannot join"),
    ],
)
def test_what_cannot_be_joined_is_refused(more: dict, sentence: str) -> None:
    with pytest.raises(BatchError, match=sentence):
        BurstCollator(lambda rows: rows[0], packing=True)([TEXT, TEXT | more])


def test_positions_through_the_whole_row_are_refused() -> None:
    model = models.patch(seeing_model("HunYuanVL"))
    with pytest.raises(BatchError, match="Give position_ids that begin anew in each document"):
        model(**collate("HunYuanVL"))
