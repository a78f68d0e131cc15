"""Trains LoRA adapters by rewards of your own with TRL's `GRPOTrainer`. Rows have `prompt`.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/grpo.py MODEL prompts.jsonl
"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import hf_burst


def brief(completions, **columns):
    return [-float(len(text)) for text in completions]


model_name, *files = sys.argv[1:]
settings = GRPOConfig(
    output_dir="outputs/grpo",
    parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
    use_cpu=not torch.cuda.is_available(),
    num_generations=4,
    per_device_train_batch_size=4,  # the answers to a prompt, which is then computed once
    max_completion_length=16,
    max_steps=2,  # a trial; without it, whole epochs
    report_to="none",
)
model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="bfloat16"))
trainer = GRPOTrainer(
    model,
    brief,
    settings,
    load_dataset("json", data_files=files, split="train"),  # prompt
    peft_config=LoraConfig(target_modules="all-linear"),
)
trainer.train()
