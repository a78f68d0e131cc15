"""Trains in a loop of its own, and writes checkpoints while the training goes on.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/async_save.py MODEL books/*.txt
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, InitProcessGroupKwargs
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_burst

model_name, *files = sys.argv[1:]
folder = Path("outputs/asynchronous")
tokenizer = AutoTokenizer.from_pretrained(model_name)
texts = [tokenizer(Path(file).read_text(), return_tensors="pt")["input_ids"] for file in files]
launched = "WORLD_SIZE" in os.environ  # one process alone has no process group
backend = InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision="bf16" if torch.cuda.is_available() else "no",
    parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
    kwargs_handlers=[backend] if launched else [],
)
model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="float32"))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
model.train()  # from_pretrained leaves it in evaluation
saver = dist.new_group(backend="gloo") if launched else None  # beside the messages of the training


def state(step):
    weights, moments = get_state_dict(model, optimizer.optimizer)
    return {"weights": weights, "moments": moments, "step": step}


first, pending = 0, None
whole = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # which torch writes last
if whole:
    stored = state(0)
    dcp.load(stored, checkpoint_id=folder / str(max(whole)))
    set_state_dict(model, optimizer.optimizer, model_state_dict=stored["weights"], optim_state_dict=stored["moments"])
    first = stored["step"]
for step in range(first, 6):
    text = texts[step % len(texts)].to(accelerator.device)
    loss = model(input_ids=text, labels=text).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss:.4f}")
    if (step + 1) % 2 == 0:
        if pending is not None:
            pending.result()  # one at a time
        pending = dcp.async_save(state(step + 1), checkpoint_id=folder / str(step + 1), process_group=saver)
if pending is not None:
    pending.result()
