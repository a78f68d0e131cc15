"""The names a user may rely on, each with a docstring that says what it takes; nothing is imported before its use."""

import inspect
import subprocess
import sys

import pytest

import hf_burst

NAMES = [
    "AttentionRequest",
    "BurstCallback",
    "BurstCollator",
    "BurstConfig",
    "BurstParallelismConfig",
    "BurstResume",
    "ContextGroup",
    "MaskPattern",
    "SequenceLayout",
    "burst_attention",
    "check_model",
    "last_checkpoint",
    "patch_model",
    "shard_batch",
    "token_losses",
    "unpatch_model",
]


def test_the_public_names_are_these() -> None:
    assert hf_burst.__all__ == NAMES
    assert set(NAMES) <= set(dir(hf_burst))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hf_burst.nothing


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(hf_burst, name)
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
