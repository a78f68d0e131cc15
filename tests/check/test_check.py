"""`hf-burst check`: a class that nobody has seen is compared and then served, a wrong one stays refused, and a verdict
holds for what it was found on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import constants
from transformers import (
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    dynamic_module_utils,
)

import hf_burst
from hf_burst.check.compare import compare, compare_batch
from hf_burst.check.ranks import run_on_ranks
from hf_burst.check.run import check_batch, find_target, read_batch
from hf_burst.check.tiny import LAYERS, WINDOW, shrink, tiny_copy
from hf_burst.cli import main
from hf_burst.errors import BatchError, ConfigError, RankMismatchError, UnsupportedModelError
from hf_burst.hf import admission, patch
from hf_burst.hf.admission import Row
from hf_burst.hf.view import ModelView
from hf_burst.layers.tiled import _Call
from tests.support import models
from tests.support.ranks import RankError, RankPool

SOURCE = """
from torch import nn
from transformers import GenerationMixin, LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

class UnseenConfig(LlamaConfig):
    model_type = "unseen"

class UnseenForCausalLM(LlamaPreTrainedModel, GenerationMixin):
    config_class = UnseenConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        kwargs.pop("use_cache", None)
        x = self.model(input_ids, attention_mask, position_ids, use_cache=False, **kwargs).last_hidden_state
        logits = self.lm_head(self.mixed(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def mixed(self, x):
        return x

class SummingForCausalLM(UnseenForCausalLM):
    def mixed(self, x):
        layers = range(self.config.num_hidden_layers)
        return x + 0.1 * x.cumsum(1) * sum(layer in layers for layer in self.config.summing_layers)
"""
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where verdicts are remembered during a test."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "home"


@pytest.fixture
def unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a class that hf_burst does not come with, and with one that sums over the tokens of a rank."""
    (tmp_path / "unseen_family.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unseen_family", raising=False)
    import unseen_family  # type: ignore[import-not-found]

    return unseen_family


@pytest.mark.slow
def test_a_class_nobody_has_seen_is_checked_and_then_served(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "modeling_unseen.py").write_text(SOURCE)
    classes = {"AutoConfig": "UnseenConfig", "AutoModelForCausalLM": "UnseenForCausalLM"}
    auto_map = {auto: f"modeling_unseen.{name}" for auto, name in classes.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "unseen", "auto_map": auto_map, **SIZES}))

    assert main(["check", str(folder)]) == 1
    assert "comes with code of its own" in capsys.readouterr().err

    target = find_target(str(folder), trust_remote_code=True)
    model = target.model_class(target.config)
    with pytest.raises(UnsupportedModelError, match=f"hf-burst check '{folder}'"):
        hf_burst.patch_model(model)
    assert main(["check", str(folder), "--trust-remote-code"]) == 0
    printed = capsys.readouterr().out
    assert "packed: exact" in printed
    assert "patch_model serves" in printed
    assert len(list((home / "hf_burst").glob("check-*.json"))) == 1
    hf_burst.patch_model(model)
    assert admission.served_by(ModelView(model)) == f"checked {admission.fingerprint(ModelView(model))}"


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_a_class_that_mixes_the_tokens_of_a_rank_is_found_wrong_and_stays_refused(unseen: ModuleType) -> None:
    model = unseen.SummingForCausalLM(unseen.UnseenConfig(**{**SIZES, "num_hidden_layers": 9}, summing_layers=[8]))
    verdict = hf_burst.check_model(model)
    assert verdict.result == "wrong"
    assert min(verdict.errors.values()) > 1e-3
    with pytest.raises(UnsupportedModelError, match=r"found wrong over several ranks \(one sequence"):
        hf_burst.patch_model(model)


def compared_in_tiles(rank: int, size: int) -> tuple[str, bool, list[int]]:
    """The verdict on a class, whether a batch is equal, and how many modules ran in tiles in each of the two."""
    make, own, counts = partial(tiny_copy, LlamaForCausalLM, LlamaConfig()), _Call.compute, [0, 0]

    def counted(call: Any, inputs: Any) -> torch.Tensor:
        counts[-1] += 1
        return own(call, inputs)

    with mock.patch.object(_Call, "compute", counted):
        verdict = compare(make)
        counts.append(0)
        comparison = compare_batch(make, models.make_batch("plain", 43))
    return verdict.result, comparison.equal, counts[1:]


def test_mlps_are_compared_in_tiles(ranks: Callable[[int], RankPool]) -> None:
    for result, equal, counts in ranks(2).run(compared_in_tiles):
        assert (result, equal) == ("exact", True)
        assert min(counts) >= LAYERS


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_a_loss_that_is_wrong_over_ranks_is_seen_on_a_batch(
    unseen: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = models.make_batch("packed")
    comparison, weights = check_batch(
        unseen.SummingForCausalLM(unseen.UnseenConfig(**SIZES, summing_layers=[1])), batch
    )
    assert not comparison.equal
    assert comparison.error > 1e-3
    assert "random weights of a tiny model" in weights

    folder = tmp_path / "llama"
    models.make_model("llama").save_pretrained(folder)
    torch.save(batch, tmp_path / "batch.pt")
    assert main(["check", str(folder), "--batch", str(tmp_path / "batch.pt")]) == 0
    printed = capsys.readouterr().out
    assert f"the weights in {folder}" in printed
    assert "4 sequences or packed documents, 32 labels count" in printed
    assert "equal: relative difference" in printed
    assert "tolerance 0.0001" in printed


def test_a_verdict_holds_for_class_source_and_versions(
    unseen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(**settings: Any) -> str | None:
        model = unseen.UnseenForCausalLM(unseen.UnseenConfig(**{**SIZES, **settings}))
        return admission.fingerprint(ModelView(model))

    first, others = fingerprint(), list[str | None]()
    assert fingerprint(hidden_size=64, num_hidden_layers=3) == first
    for package in (admission.transformers, admission.torch, admission):
        with monkeypatch.context() as changed:
            changed.setattr(package, "__version__", "9.9")
            others.append(fingerprint())
    (tmp_path / "unseen_family.py").write_text(SOURCE + "\n# changed\n")
    others.append(fingerprint())
    assert len({first, *others}) == 1 + len(others)


def test_a_verdict_holds_for_the_modules_that_a_class_imports_from_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "unseen_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layers.py").write_text("def mixed(x):\n    return x\n")
    (package / "unused.py").touch()
    (package / "family.py").write_text("from .layers import mixed\n" + SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import unseen_package.family as family  # type: ignore[import-not-found]

    model = family.UnseenForCausalLM(family.UnseenConfig(**SIZES))
    first = admission.fingerprint(ModelView(model))
    import unseen_package.unused  # type: ignore[import-not-found]  # noqa: F401

    assert admission.fingerprint(ModelView(model)) == first
    (package / "layers.py").write_text("def mixed(x):\n    return x.cumsum(1)\n")
    assert admission.fingerprint(ModelView(model)) != first


def test_layers_from_elsewhere_change_the_fingerprint_and_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = "from torch import nn\n\nclass Mixer(nn.Identity):\n    pass\n"
    (tmp_path / "mixing_layers.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from mixing_layers import Mixer  # type: ignore[import-not-found]

    model = models.make_model("llama")
    hf_burst.unpatch_model(hf_burst.patch_model(model))
    assert not caplog.records
    first = admission.fingerprint(ModelView(model))
    model.model.layers[0].post_attention_layernorm = Mixer()
    swapped = admission.fingerprint(ModelView(model))
    (tmp_path / "mixing_layers.py").write_text(source + "# changed\n")
    assert len({first, swapped, admission.fingerprint(ModelView(model))}) == 3

    assert admission.served_by(ModelView(model)) == "shipped"
    assert "not compared with one process: Mixer" in caplog.text
    assert "hf-burst check" in caplog.text
    caplog.clear()
    admission.remember(admission.Verdict("exact", fingerprint=admission.fingerprint(ModelView(model)) or ""))
    assert admission.served_by(ModelView(model)).startswith("checked ")
    assert not caplog.records


def test_norms_of_flash_linear_attention_are_no_classes_of_ones_own() -> None:
    """Its convolutions are, since they compute over tokens."""
    model, names = models.make_model("llama"), ("FusedRMSNormGated", "ShortConvolution")
    for name in names:
        kind = type(name, (torch.nn.Module,), {"__module__": "fla.modules.fused"})
        model.model.add_module(name, kind())
    assert [kind.__name__ for kind in admission.own_classes(ModelView(model))] == ["ShortConvolution"]


def test_a_wrong_verdict_goes_before_the_shipped_one() -> None:
    model = models.make_model("llama")
    digest = admission.fingerprint(ModelView(model)) or ""
    for result in ("exact", "wrong"):
        admission.remember(admission.Verdict(result, {"packed": 0.9}, fingerprint=digest))
        if result == "exact":
            assert admission.served_by(ModelView(model)) == "shipped"
    with pytest.raises(UnsupportedModelError, match="found wrong over several ranks"):
        hf_burst.patch_model(model)


def test_what_is_remembered_must_be_a_verdict(unseen: ModuleType) -> None:
    model = unseen.UnseenForCausalLM(unseen.UnseenConfig(**SIZES))
    digest = admission.fingerprint(ModelView(model)) or ""
    path = admission.remember(admission.Verdict("exact", fingerprint=digest))
    assert admission.served_by(ModelView(model)) == f"checked {digest}"
    for nonsense in ("", "[]", '{"color": 1}'):
        path.write_text(nonsense)
        with pytest.raises(UnsupportedModelError, match=r"hf_burst.check_model\(model\)"):
            admission.served_by(ModelView(model))


@pytest.mark.parametrize("result", ["exact", "wrong", "nothing"])
def test_a_class_changed_in_a_newer_transformers_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, result: str
) -> None:
    """No process is started to compare it: the command is named, and what it found counts."""
    model = models.make_model("qwen2")
    model.config.name_or_path = "some/folder"
    for start in ("Popen", "run"):
        monkeypatch.setattr(subprocess, start, mock.Mock(side_effect=AssertionError("a process")))
    digest = admission.source_hash(type(model).__module__) or ""
    for version, shipped in (("5.99.0", digest), ("5.18.0", "another"), ("5.99.0", "another")):
        assert not caplog.records
        monkeypatch.setattr(admission.transformers, "__version__", version)
        monkeypatch.setattr(admission, "CLASSES", {type(model).__name__: Row(shipped)})
        assert admission.served_by(ModelView(model)) == "shipped"
    (warning,) = caplog.records
    assert "run on every node: hf-burst check some/folder (or, in Python" in warning.getMessage()
    if result == "nothing":
        return
    caplog.clear()
    admission.remember(
        admission.Verdict(result, {"packed": 0.9}, fingerprint=admission.fingerprint(ModelView(model)) or "")
    )
    if result == "wrong":
        with pytest.raises(UnsupportedModelError, match="found wrong over several ranks"):
            admission.served_by(ModelView(model))
    else:
        assert admission.served_by(ModelView(model)) == "shipped"
    assert not caplog.records


def serve_a_changed_class(rank: int, size: int) -> int:
    model = models.make_model("qwen2")
    with (
        mock.patch.object(admission.transformers, "__version__", "5.99.0"),
        mock.patch.object(admission, "CLASSES", {type(model).__name__: Row("another")}),
        mock.patch.object(admission.logger, "warning") as warning,
    ):
        assert admission.served_by(ModelView(model)) == "shipped"
    return warning.call_count


def test_ranks_warn_once_of_a_changed_class(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(serve_a_changed_class) == [1, 0]


def test_ranks_agree_by_which_verdict_a_model_is_served(ranks: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2).run(serve_by_own_verdict)
    assert all(isinstance(error, RankMismatchError) for error in failure.value.errors)
    assert "served by: rank 0 has checked 0, rank 1 has checked 1" in str(failure.value)


def serve_by_own_verdict(rank: int, size: int) -> None:
    with mock.patch.object(patch, "served_by", return_value=f"checked {rank}"):
        model = models.patch(models.make_model("llama"))
    model(**models.make_batch("plain"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(num_key_value_heads=1), {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": LAYERS}),
        (LlamaConfig(num_key_value_heads=8, tie_word_embeddings=True), {"num_key_value_heads": 2, "vocab_size": 67}),
        (
            Gemma2Config(attention_dropout=0.1),
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "attn_logit_softcapping": 50.0},
        ),
        (Qwen2Config(use_sliding_window=False), {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
        (BertConfig(is_decoder=True), {"is_decoder": True, "hidden_dropout_prob": 0.0, "type_vocab_size": 2}),
    ],
)
def test_sizes_shrink_and_structure_stays(config: PreTrainedConfig, expected: dict[str, Any]) -> None:
    small = shrink(config).to_dict()
    assert {key: small[key] for key in expected} == expected
    assert small["tie_word_embeddings"] == config.tie_word_embeddings


def test_layers_and_windows_by_other_names_stay_in_effect() -> None:
    config = LlamaConfig(num_hidden_layers=24, full_attn_idxs=[7, 15, 23], local_window_len=4096)
    config.attn_layer_period, config.attn_layer_offset, config.sliding_window = 8, 4, -1
    small = shrink(config)
    assert small.full_attn_idxs == [1, 3]
    assert small.local_window_len == WINDOW
    assert (small.attn_layer_period, small.attn_layer_offset, small.sliding_window) == (2, 1, -1)


def test_no_kind_of_layer_is_left_out() -> None:
    kinds = [f"kind_{layer % 5}" for layer in range(30)]
    small = shrink(PreTrainedConfig(num_hidden_layers=30, layer_kinds=kinds))
    assert small.layer_kinds == kinds[:5]
    assert small.num_hidden_layers == 5


def test_scaled_rotary_positions_stay_in_effect() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "rope_theta": 1e4}
    small = shrink(LlamaConfig(rope_parameters={**rope, "original_max_position_embeddings": 4096}))
    assert small.rope_parameters["original_max_position_embeddings"] == 20
    assert small.rope_parameters["long_factor"] == [4.0] * 4
    default = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"sliding_attention": default, "full_attention": {**default, "rope_type": "dynamic", "factor": 2.0}}
    small = shrink(Gemma3TextConfig(rope_parameters=ropes))
    assert small.max_position_embeddings == 20
    assert small.rope_parameters == ropes


def test_the_vocabulary_stays_for_a_batch() -> None:
    model = tiny_copy(Qwen2ForCausalLM, Qwen2Config(vocab_size=997, pad_token_id=990), batch_length=300)
    assert (model.config.vocab_size, model.config.pad_token_id) == (997, 990)
    assert model.config.max_position_embeddings == 302


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no/such-model", "names no model whose config can be read"),
        ("NoSuchForCausalLM", "names no model whose config can be read"),
        ("missing/", "'missing/' does not exist; the current folder is /"),
        ("missing.json", "'missing.json' does not exist; the current folder is /"),
        ("LlamaForSequenceClassification", None),
    ],
)
def test_models_that_cannot_be_checked_are_named(
    name: str, sentence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if sentence is not None:
        assert main(["check", name]) == 1
        assert sentence in capsys.readouterr().err
    else:
        assert find_target(name).model_class.__name__ == name


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(name: str, file: str) -> bool:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("hf_burst.check.run.file_exists", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    again = mock.patch("huggingface_hub.utils._http.get_session", side_effect=AssertionError("asked again"))
    with again, pytest.raises(ConfigError, match="'no/such-model' names no model"):
        find_target("no/such-model")
    assert asked == ["no/such-model"]
    assert find_target("LlamaForCausalLM").model_class.__name__ == "LlamaForCausalLM"
    assert asked == ["no/such-model"]


def test_a_config_without_a_language_model_head_is_named(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no class of a language model"):
        find_target(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="names no model whose config can be read"):
        find_target(str(tmp_path / "empty"))
    (tmp_path / "empty/adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ConfigError, match=r"holds an adapter\. Give its base model, 'some/base'"):
        find_target(str(tmp_path / "empty"))
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    assert find_target(str(tmp_path / "config.json")).model_class.__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([1, 2], "batch.pt' holds no batch"),
        ({"input_ids": [[1, 2]]}, "it lacks input_ids, or labels"),
        ({"input_ids": torch.ones(2), "labels": torch.ones(2)}, r"labels of shape \(batch, tokens\)"),
        ({"input_ids": "a", "labels": torch.ones(1, 2)}, "of its values, input_ids are no tensors"),
    ],
)
def test_a_file_that_holds_no_batch_is_named(tmp_path: Path, content: object, why: str) -> None:
    torch.save(content, tmp_path / "batch.pt")
    with pytest.raises(BatchError, match=why):
        read_batch(tmp_path / "batch.pt")
    (tmp_path / "batch.pt").write_text("nonsense")
    with pytest.raises(BatchError, match="holds no batch"):
        read_batch(tmp_path / "batch.pt")
    with pytest.raises(BatchError, match="holds no batch"):
        read_batch(tmp_path / "missing.pt")


def test_a_saved_batch_is_read(tmp_path: Path) -> None:
    batch = models.make_batch("plain")
    torch.save(batch, tmp_path / "batch.pt")
    loaded = read_batch(tmp_path / "batch.pt")
    assert all(torch.equal(loaded[key], batch[key]) for key in batch)


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_a_comparison_that_hangs_or_dies_ends_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="did not end within 1 seconds"):
        run_on_ranks(time.sleep, 600.0, limit=1.0)
    with pytest.raises(ConfigError, match="A rank of the comparison ended with exit code 3"):
        run_on_ranks(os._exit, 3, limit=120.0)
    with pytest.raises(BatchError, match="holds no batch"):
        run_on_ranks(read_batch, Path("missing.pt"), limit=120.0)
    with pytest.raises(ConfigError, match="--limit is 0"):
        main_or_raise(["LlamaForCausalLM", "--limit", "0"])


def main_or_raise(words: list[str]) -> None:
    import argparse

    from hf_burst.cli import check

    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    check.run(parser.parse_args(words))
