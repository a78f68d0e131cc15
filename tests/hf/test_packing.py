"""Samples with images that are joined into a packed row."""

import pytest
import torch

from hf_burst import BurstCollator
from hf_burst.errors import BatchError
from recipes.tiny_pictures import documents, seeing_batch


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
