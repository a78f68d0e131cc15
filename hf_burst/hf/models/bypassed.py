"""Checks for code that would bypass the patch: replaced forwards and custom attention functions."""

import inspect
import sys
from functools import cache, partial
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import UnsupportedModelError
from ..admission import ATTENTION_FUNCTIONS
from ..attention import NAME
from ..view import ModelView
from .recurrent import COUNTERPARTS, recurrent_modules

_WRAPPERS = ("torch.", "accelerate.", "transformers.utils.")  # decorators for autocast, compile, output conversion


def function_name(function: Any) -> str:
    """Returns the module and name of a function or method, without the wrappers of known libraries."""
    while True:
        if isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        place = type(function).__module__ if code is None else str(function.__globals__.get("__name__"))
        inner = getattr(function, "__wrapped__", None)
        if inner is None or not place.startswith(_WRAPPERS):
            return f"{place}.{type(function).__qualname__ if code is None else code.co_qualname}"
        function = inner


def forward_name(module: nn.Module) -> str:
    """Returns the name of the function that runs when the module is called, see [`function_name`]."""
    return function_name(vars(module).get("forward") or type(module).forward)


def attention_modules(reader: ModelView) -> dict[nn.Module, str]:
    """Returns the modules of a language model that call an attention function of Transformers, with their paths.

    Transformers' own classes set `is_causal`. Custom classes may lack it, so they are recognised by their name.
    """
    found = {module: path for path, module in reader.named if _says_is_causal(module)}
    inside = {inner for module in found for inner in reader.inside(module)}
    recurrent = set(reader.find(recurrent_modules))
    for path, module in reader.named:
        own = not type(module).__module__.startswith("transformers.") and type(module).__name__.endswith("Attention")
        if own and module not in inside | recurrent and found.keys().isdisjoint(reader.inside(module)):
            found[module] = path
    return found


def _says_is_causal(module: nn.Module) -> bool:
    """Returns whether the module itself sets `is_causal`; peft's wrappers only forward the attribute."""
    return "is_causal" in vars(module) or hasattr(type(module), "is_causal")


def check_attention_functions(view: ModelView) -> None:
    """Raises for a custom attention function, because the patch would replace it and lose what it computes."""
    of_model = view.root.config._attn_implementation
    for module in view.find(attention_modules):
        name = getattr(getattr(module, "config", None), "_attn_implementation", of_model)
        if name in (NAME, None):
            continue
        file = type(module).__module__
        names = vars(sys.modules[file]) if file in sys.modules else {}
        if name == "eager":
            function = names.get("eager_attention_forward")
            known = function is None or function_name(function).startswith(("transformers.", f"{file}."))
        else:
            interface = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
            function = interface.get(name) or interface.get(name.removeprefix("paged|"))
            place, _, own = function_name(function).rpartition(".")
            known = place.startswith("transformers.") and own in ATTENTION_FUNCTIONS
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
        if known and mask is not None and not function_name(mask).startswith("transformers."):
            function, known = mask, False
        if not known:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends by {name!r}, which is {function_name(function)}",
                "BurstAttention would take its place, without whatever it adds to Transformers' own functions",
                "If you mean plain attention, call model.set_attn_implementation('sdpa') first",
            )


def check_recurrent_sources(view: ModelView) -> None:
    """Raises if a recurrent layer's forward was monkey-patched, because the layer is then no longer recognised."""
    kinds: set[Any] = view.classes
    for kind in kinds.difference(map(type, view.find(recurrent_modules))):
        forward: Any = inspect.unwrap(kind.forward)
        home = {base.__module__ for base in kind.__mro__}
        own = getattr(forward, "__globals__", {}).get("__name__") in home
        if not own and kind.__module__.startswith("transformers.models.") and _was_recurrent(kind):
            raise UnsupportedModelError(
                f"The forward of {kind.__name__} was replaced by {function_name(kind.forward)}",
                "no state can pass to it from another rank",
                "Put its own back before the model is patched",
            )


@cache
def _was_recurrent(kind: Any) -> bool:
    """Returns whether the source of a class calls a recurrent function."""
    return any(f"{name}(" in inspect.getsource(kind) for name in COUNTERPARTS)
