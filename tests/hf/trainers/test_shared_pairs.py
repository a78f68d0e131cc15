"""Trainers whose rows begin alike: three steps on ranks that compute each beginning once are those of one process."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hf_burst
from hf_burst.hf.batches import joining
from tests.hf.trainers.test_trl import RATIOS, compare
from tests.support import models, trainers
from tests.support.ranks import RankPool
from tests.support.trainers import Case, make_trainer

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
Ranks = Callable[[int], RankPool]


def sharing(case: Case, seed: int = 0) -> torch.nn.Module:
    """A model as the harness makes it, that shares what it can."""
    memory = trainers.LITTLE.memory if case.checkpointing and not seed else "auto"
    config = hf_burst.BurstConfig(share_prefixes=True, memory=memory)
    model = hf_burst.patch_model(models.make_model(case.model, seed=seed), config)
    model.config.use_cache = False
    return model


def train(rank: int, size: int, folder: str, case: Case, data: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Runs a case; how many tokens were joined, and to how many."""
    data = datasets.load_from_disk(data) if isinstance(data, str) else data
    counts = [0, 0]
    join = joining.join_texts

    def counting(*arguments: Any) -> Any:
        joined = join(*arguments)
        if joined is not None:
            counts[0] += joined.given_tokens
            counts[1] += joined.tokens
        return joined

    with (
        mock.patch.object(trainers, "make_model", sharing) if case.burst else nullcontext(),
        mock.patch("hf_burst.hf.parts.shared_beginnings.join_texts", counting),
        trainers.small_pages(),
    ):
        return trainers.finish(make_trainer(case, folder, data, **options)) | {"counts": counts}


SETTINGS: dict[str, tuple[Case, dict[str, Any]]] = {
    "reference": (Case("DPOTrainer"), {}),
    "one rank": (Case("DPOTrainer", burst=1), {}),
    "adapters": (Case("DPOTrainer", lora=True, checkpointing=True), {}),
    "three ranks": (Case("DPOTrainer", burst=3, checkpointing=True), {}),
    "two groups": (Case("DPOTrainer", data=2), {"use_weighting": True, "ld_alpha": 0.5}),
    "in advance": (Case("DPOTrainer", lora=True), {"precompute_ref_log_probs": True}),
    "several losses": (Case("DPOTrainer"), {"loss_type": ["sigmoid", "sft"]}),
    "kto": (Case("KTOTrainer"), {}),
}


LATER = ("three ranks", "one rank", "adapters", "two groups", "several losses", "in advance", "kto")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LATER)) for n in SETTINGS])
def test_pairs_share_their_prompt(ranks: Ranks, tmp_path: Path, name: str) -> None:
    case, options = SETTINGS[name]
    data: Any = datasets.Dataset.from_list(trainers.preferences())
    if "precompute_ref_log_probs" in options:  # TRL reads from the cache file of a data set on a disk
        data.save_to_disk(tmp_path / "data")
        data = str(tmp_path / "data")
    found = ranks(case.ranks).run(train, str(tmp_path / "ranks"), case, data, options)
    for cached in tmp_path.glob("data/cache-*"):
        cached.unlink()
    wanted = train(0, 1, str(tmp_path / "one"), case.alone, data, options)
    for run in found:
        whole, joined = run.pop("counts")
        assert case.trainer != "DPOTrainer" or joined < 0.95 * whole
        compare(run, {key: value for key, value in wanted.items() if key != "counts"}, RATIOS)
