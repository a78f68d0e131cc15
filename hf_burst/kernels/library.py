"""The packages and GPUs that kernels need: looked for once, and a sentence where one is missing."""

import inspect
from functools import lru_cache
from importlib import import_module

import torch

# functions of a module, and the names of the parameters by which they are called
Signatures = tuple[tuple[str, tuple[str, ...]], ...]


@lru_cache(maxsize=32)
def package_refusal(package: str, module: str, signatures: Signatures) -> str | None:
    """Why a kernel's package cannot be used; `None` if it can. Imports it.

    Args:
        package (`str`): Its name for pip.
        module (`str`): The module that is called.
        signatures (`tuple` of `(str, tuple of str)`): Its functions, and all parameters that they are passed.
    """
    try:
        library = import_module(module)
    except Exception as problem:  # an extension that was built for another torch fails in many ways
        reason = str(problem).strip().splitlines() or [""]
        return f"needs the package {package}, and {module} cannot be imported ({type(problem).__name__}: {reason[0]})"
    for name, passed in signatures:
        function = getattr(library, name, lambda: None)
        known = inspect.signature(getattr(function, "_init_fn", function)).parameters  # or of a custom operator
        asked = {own.name for own in known.values() if own.default is own.empty}
        if not asked <= set(passed) <= known.keys():
            called = f"{module}.{name}({', '.join(passed)})"
            return f"calls {called}, which the {package} that is installed does not have: reinstall it"
    return None


def gpu_refusal(lowest: tuple[int, int], beyond: tuple[int, int] | None = None) -> str | None:
    """Why the current GPU cannot run a kernel that needs compute capability `lowest` or above, and less than `beyond`;
    `None` if it can."""
    if not torch.cuda.is_available():
        return "needs a GPU, and torch can use none here"
    own = torch.cuda.get_device_capability()
    if own < lowest or (beyond is not None and own >= beyond):
        upper = "" if beyond is None else f" and below {beyond[0]}.{beyond[1]}"
        return f"needs compute capability {lowest[0]}.{lowest[1]} or above{upper}, this GPU has {own[0]}.{own[1]}"
    return None
