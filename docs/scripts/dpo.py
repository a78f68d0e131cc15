"""Trains all weights on pairs of answers by TRL's `DPOTrainer`. Rows have `prompt`, `chosen` and `rejected`.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/dpo.py MODEL pairs.jsonl
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

import hf_burst

model_name, *files = sys.argv[1:]
model, reference = (
    hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")) for _ in range(2)
)
trainer = DPOTrainer(
    model,
    reference,  # not needed with LoRA
    args=DPOConfig(
        output_dir="outputs/dpo_script",
        parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_length=131072,  # TRL's 1,024 would cut answers off
        max_steps=2,  # a trial; without it, whole epochs
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files=files, split="train"),  # prompt, chosen, rejected
)
trainer.train()
