"""The names a user may rely on, each with a docstring that says what it takes; nothing is imported before its use."""

import inspect
import subprocess
import sys

import pytest

import hf_burst
import hf_burst.attention

NAMES = [
    "BurstCallback",
    "BurstCollator",
    "BurstConfig",
    "BurstParallelismConfig",
    "BurstResume",
    "Document",
    "Experts4bitConfig",
    "GroupCollator",
    "Memory",
    "admit",
    "check_model",
    "embeddings",
    "generate",
    "last_checkpoint",
    "patch_model",
    "remember",
    "shard_batch",
    "token_divergences",
    "token_losses",
    "unpatch_model",
]
FOR_EXPERTS = ["AttentionRequest", "ContextGroup", "MaskPattern", "SequenceLayout", "burst_attention"]
SETTINGS = ["schedule", "kernel", "transport", "chunking", "gradients", "memory", "share_prefixes"]
SETTINGS_OF_MEMORY = ["activation_offloading", "tiled_mlp", "head_groups", "layers_per_checkpoint", "attention_keep"]


def test_the_public_names_are_these() -> None:
    assert hf_burst.__all__ == NAMES
    assert set(NAMES) <= set(dir(hf_burst))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_burst.nothing


def test_the_settings_are_these() -> None:
    assert list(inspect.signature(hf_burst.BurstConfig).parameters) == SETTINGS
    assert list(inspect.signature(hf_burst.Memory).parameters) == SETTINGS_OF_MEMORY
    assert list(inspect.signature(hf_burst.patch_model).parameters) == ["model", "config", "group"]


@pytest.mark.parametrize("name", FOR_EXPERTS)
def test_names_for_experts_have_a_room_of_their_own(name: str) -> None:
    assert name in hf_burst.attention.__all__
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; it has attention, errors, BurstCallback"):
        getattr(hf_burst, name)


def described(name: str) -> tuple[str, object]:
    return name, getattr(hf_burst if name in NAMES else hf_burst.attention, name)


@pytest.mark.parametrize(("name", "thing"), map(described, [*NAMES, *FOR_EXPERTS]))
def test_every_public_name_is_documented(name: str, thing: object) -> None:
    text = inspect.getdoc(thing) or ""
    target = thing.__init__ if inspect.isclass(thing) else thing
    parameters = [key for key in inspect.signature(target).parameters if key not in ("self", "args", "kwargs")]
    inherited = set(inspect.signature(thing.__base__).parameters) if inspect.isclass(thing) else set()
    for parameter in parameters:
        assert parameter in inherited or f"{parameter} (" in text, f"{name} does not say what {parameter} is"
    for key, method in vars(thing).items() if inspect.isclass(thing) else ():
        if not key.startswith("_") and callable(method):
            assert inspect.getdoc(method), f"{name}.{key} has no docstring"


def test_importing_the_package_imports_nothing_large() -> None:
    code = "import sys, hf_burst; assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_rooms_that_users_name_come_with_the_package() -> None:
    code = "import hf_burst; assert issubclass(hf_burst.errors.ConfigError, ValueError); hf_burst.attention.MaskPattern"
    subprocess.run([sys.executable, "-c", code], check=True)
