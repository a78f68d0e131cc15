"""Trains all weights of a masked language model on text files by `Trainer`.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/encoder.py MODEL books/*.txt
"""

import sys

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import hf_burst

model_name, *files = sys.argv[1:]
model = hf_burst.patch_model(AutoModelForMaskedLM.from_pretrained(model_name, dtype="float32"))
tokenizer = AutoTokenizer.from_pretrained(model_name)
documents = load_dataset("text", data_files=files, sample_by="document", split="train")
documents = documents.map(lambda row: tokenizer(row["text"], truncation=True, max_length=131072))
Trainer(
    model,
    TrainingArguments(
        output_dir="outputs/encoder",
        parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
        per_device_train_batch_size=1,
        bf16=torch.cuda.is_available(),  # computes in bf16
        max_steps=2,  # a trial; without it, whole epochs
        report_to="none",
    ),
    train_dataset=documents.remove_columns("text"),
    data_collator=DataCollatorForLanguageModeling(tokenizer),
).train()
