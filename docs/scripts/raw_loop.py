"""Trains all weights on text files by a loop of its own, which accelerate prepares.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/raw_loop.py MODEL books/*.txt
"""

import sys

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import hf_burst

ACCUMULATION = 2
model_name, *files = sys.argv[1:]
model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="float32"))
tokenizer = AutoTokenizer.from_pretrained(model_name)
documents = load_dataset("text", data_files=files, sample_by="document", split="train")
documents = documents.map(lambda row: tokenizer(row["text"], truncation=True, max_length=131072))
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(documents.remove_columns("text"), batch_size=1, collate_fn=collator)

accelerator = Accelerator(
    mixed_precision="bf16" if torch.cuda.is_available() else "no",
    parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
    gradient_accumulation_steps=ACCUMULATION,
)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5), loader)
model.train()  # from_pretrained leaves it in evaluation
batches = list(loader)
if len(batches) < ACCUMULATION:
    raise SystemExit(f"a step takes {ACCUMULATION} batches, and there are {len(batches)}")
for start in range(0, len(batches) - ACCUMULATION + 1, ACCUMULATION):
    group = batches[start : start + ACCUMULATION]
    labels = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
    items = accelerator.gather(labels).sum()  # over all ranks, as Trainer counts them
    total = torch.zeros((), device=accelerator.device)
    for batch in group:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=items).loss
            accelerator.backward(loss * accelerator.num_processes * ACCUMULATION)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    accelerator.print(f"step {start // ACCUMULATION}: loss {accelerator.reduce(total):.4f}")  # summed, as the items are
