"""Classes of somebody else's: admitted from outside of the package, and served as those of the table."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hf_burst
from hf_burst.errors import ConfigError, RankMismatchError, UnsupportedModelError
from hf_burst.hf.admission import CLASSES, Row, row_of, source_hash
from tests.support import models
from tests.support.gradients import Result, assert_equal, loss_and_gradients
from tests.support.ranks import RankError, RankPool
from tests.support.tiny_pictures import seeing_batch
from tests.support.tiny_seeing import seeing_model

Ranks = Callable[[int], RankPool]
SOURCE = """
from torch import nn
from transformers import GenerationMixin, LlamaConfig, LlavaForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

class Residual(nn.Linear):
    pass

class OwnForCausalLM(LlamaPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.mixer = Residual(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask, position_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden + self.mixer(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

class OwnLlava(LlavaForConditionalGeneration):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the module lies, and no verdict is remembered."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "somebodys_models.py").write_text(SOURCE)
    return str(tmp_path)


def module_in(folder: str) -> ModuleType:
    """The module of somebody else, imported anew."""
    sys.modules.pop("somebodys_models", None)
    sys.path.insert(0, folder)
    try:
        return import_module("somebodys_models")
    finally:
        sys.path.remove(folder)


def own_model(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind(models.make_model("llama").config).double().train()


def on_text(rank: int, size: int, folder: str) -> Result:
    model = own_model(hf_burst.admit(module_in(folder).OwnForCausalLM))
    return loss_and_gradients(models.patch(model) if size > 1 else model, models.make_batch("plain"))


def test_an_admitted_class_is_exact(ranks: Ranks, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = module_in(folder).OwnForCausalLM
    with pytest.raises(UnsupportedModelError, match=r"OwnForCausalLM has not been checked.*hf_burst.check_model"):
        hf_burst.patch_model(own_model(kind))
    assert_equal(ranks(2).run(on_text, folder), on_text(0, 1, folder))
    hf_burst.patch_model(own_model(type("Derived", (hf_burst.admit(kind),), {"__module__": kind.__module__})))
    own = [record for record in caplog.records if record.name.startswith("hf_burst")]
    assert not own, "its own layers were compared with it"


def on_images(rank: int, size: int, folder: str, images: str | None) -> tuple[Result, int]:
    """Loss and gradients, and how many images this rank encodes."""
    stock, given = seeing_model("Llava"), list[int]()
    model = hf_burst.admit(module_in(folder).OwnLlava, images=images)(stock.config).double().train()
    model.load_state_dict(stock.state_dict())
    model.base_model.vision_tower.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    if size > 1:
        models.patch(model)
    return loss_and_gradients(model, seeing_batch("Llava")), sum(given)


@pytest.mark.parametrize("images", [None, "all"])
def test_ranks_share_images_as_the_row_says(ranks: Ranks, folder: str, images: str | None) -> None:
    """Or, where it says nothing, as the class that it is made from."""
    wanted, count = on_images(0, 1, folder, images)
    found = ranks(2).run(on_images, folder, images)
    assert_equal([result for result, _ in found], wanted)
    assert CLASSES["LlavaForConditionalGeneration"].images == "images"
    assert [encoded for _, encoded in found] == ([count, count] if images else [count // 2, count // 2])


def admit_otherwise(rank: int, size: int, folder: str) -> None:
    """Each rank has a file of its own."""
    Path(folder, str(rank)).mkdir()
    Path(folder, str(rank), "somebodys_models.py").write_text(f"{SOURCE}# of {rank}")
    kind = module_in(f"{folder}/{rank}").OwnForCausalLM
    models.patch(own_model(hf_burst.admit(kind)))(**models.make_batch("plain"))


def test_ranks_agree_on_what_was_admitted(ranks: Ranks, folder: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(admit_otherwise, folder)
    assert all(isinstance(error, RankMismatchError) for error in caught.value.errors)
    assert "served by: rank 0 has admitted" in str(caught.value)


def test_a_source_that_was_not_compared_is_warned_of(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    kind = module_in(folder).OwnForCausalLM
    digest = source_hash("somebodys_models")
    hf_burst.patch_model(own_model(hf_burst.admit(kind, source=digest)))
    assert not caplog.records
    hf_burst.patch_model(own_model(hf_burst.admit(kind, source="another")))
    assert f"hash {digest}) differs from the one that was compared (hash another)" in caplog.text
    caplog.clear()
    model = own_model(hf_burst.admit(kind))
    model.mixer = type("Elsewhere", (nn.Linear,), {"__module__": "of_others"})(32, 32)
    hf_burst.patch_model(model)
    assert "From outside of somebodys_models, and not compared with one process: Elsewhere" in caplog.text


def test_what_is_never_exact_stays_refused(folder: str) -> None:
    model = own_model(hf_burst.admit(module_in(folder).OwnForCausalLM))
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModelError, match=r"is an encoder-decoder: .*\. Train it"):
        hf_burst.patch_model(model)


def test_answers_that_there_are_not(folder: str) -> None:
    kind = module_in(folder).OwnForCausalLM
    with pytest.raises(ConfigError, match=r"images='tiles': .*\. Give 'patches' or 'images' or 'all'\."):
        hf_burst.admit(kind, images="tiles")
    for other in ("OwnForCausalLM", nn.Linear):
        with pytest.raises(ConfigError, match="it is no class of models"):
            hf_burst.admit(other)  # type: ignore[type-var]
    assert row_of(kind) == Row()
