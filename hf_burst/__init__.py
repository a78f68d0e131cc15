"""Long-context fine-tuning for Hugging Face Transformers: one line patches a model with BurstAttention over all ranks.

```python
>>> model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(...))
```
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .check.run import check_model
    from .config import BurstConfig, Memory
    from .hf.admission import admit
    from .hf.batches.collator import BurstCollator, shard_batch
    from .hf.batches.grouping import GroupCollator
    from .hf.generation.document import Document, remember
    from .hf.generation.embeddings import embeddings
    from .hf.generation.generate import generate
    from .hf.generation.scores import token_divergences, token_losses
    from .hf.patch import patch_model, unpatch_model
    from .hf.trainers.accelerate import BurstParallelismConfig
    from .hf.trainers.logging import BurstCallback
    from .hf.trainers.resume import BurstResume, last_checkpoint

__all__ = [
    "BurstCallback",
    "BurstCollator",
    "BurstConfig",
    "BurstParallelismConfig",
    "BurstResume",
    "Document",
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

_HOME = {
    "BurstCallback": ".hf.trainers.logging",
    "BurstCollator": ".hf.batches.collator",
    "BurstConfig": ".config",
    "BurstParallelismConfig": ".hf.trainers.accelerate",
    "BurstResume": ".hf.trainers.resume",
    "Document": ".hf.generation.document",
    "GroupCollator": ".hf.batches.grouping",
    "Memory": ".config",
    "admit": ".hf.admission",
    "check_model": ".check.run",
    "embeddings": ".hf.generation.embeddings",
    "generate": ".hf.generation.generate",
    "last_checkpoint": ".hf.trainers.resume",
    "patch_model": ".hf.patch",
    "remember": ".hf.generation.document",
    "shard_batch": ".hf.batches.collator",
    "token_divergences": ".hf.generation.scores",
    "token_losses": ".hf.generation.scores",
    "unpatch_model": ".hf.patch",
}
_ROOMS = ("attention", "errors")
_FOR_EXPERTS = ("AttentionRequest", "ContextGroup", "MaskPattern", "SequenceLayout", "burst_attention")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name in _FOR_EXPERTS:
        raise AttributeError(f"hf_burst.{name} is in hf_burst.attention now: from hf_burst.attention import {name}.")
    if name == "RememberedDocument":
        warnings.warn("hf_burst.RememberedDocument is called hf_burst.Document now.", FutureWarning, stacklevel=2)
        name = "Document"
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
