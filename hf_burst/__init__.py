"""Long-context fine-tuning for Hugging Face Transformers: one line patches a model with BurstAttention over all ranks.

```python
>>> model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(...))
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .check.run import check_model as check_model
    from .config import BurstConfig as BurstConfig
    from .config import Memory as Memory
    from .hf.admission import admit as admit
    from .hf.batches.collator import BurstCollator as BurstCollator
    from .hf.batches.collator import GroupCollator as GroupCollator
    from .hf.batches.collator import shard_batch as shard_batch
    from .hf.generation.document import Document as Document
    from .hf.generation.document import remember as remember
    from .hf.generation.embeddings import embeddings as embeddings
    from .hf.generation.generate import generate as generate
    from .hf.generation.scores import token_divergences as token_divergences
    from .hf.generation.scores import token_losses as token_losses
    from .hf.models.experts_4bit import Experts4bitConfig as Experts4bitConfig
    from .hf.patch import patch_model as patch_model
    from .hf.patch import unpatch_model as unpatch_model
    from .hf.trainers.accelerate import BurstParallelismConfig as BurstParallelismConfig
    from .hf.trainers.logging import BurstCallback as BurstCallback
    from .hf.trainers.resume import BurstResume as BurstResume
    from .hf.trainers.resume import last_checkpoint as last_checkpoint

_HOME = {
    "BurstCallback": ".hf.trainers.logging",
    "BurstCollator": ".hf.batches.collator",
    "BurstConfig": ".config",
    "BurstParallelismConfig": ".hf.trainers.accelerate",
    "BurstResume": ".hf.trainers.resume",
    "Document": ".hf.generation.document",
    "Experts4bitConfig": ".hf.models.experts_4bit",
    "GroupCollator": ".hf.batches.collator",
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
__all__ = list(_HOME)
_ROOMS = ("attention", "errors")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"hf_burst has no attribute {name!r}; it has {', '.join([*_ROOMS, *__all__])}.")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
