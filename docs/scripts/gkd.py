"""Trains a student on a teacher's probabilities by TRL's `GKDTrainer`. Rows have the texts `prompt` and `chosen`.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/gkd.py MODEL TEACHER pairs.jsonl
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

import hf_burst

model_name, teacher_name, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_name)


def tokens(row):  # prompt and chosen are texts
    prompt, answer = (tokenizer(row[name])["input_ids"] for name in ("prompt", "chosen"))
    return {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}


settings = GKDConfig(
    output_dir="outputs/gkd",
    parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
    use_cpu=not torch.cuda.is_available(),
    bf16=True,
    lmbda=0.0,  # the answers of the data; 1.0: of the model
    beta=0.5,  # 0.0: KL(teacher | student), 1.0: KL(student | teacher)
    max_length=65536,
    max_steps=2,  # a trial; without it, whole epochs
    report_to="none",
)
trainer = GKDTrainer(
    hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")),
    AutoModelForCausalLM.from_pretrained(teacher_name, dtype="float32"),
    settings,
    train_dataset=load_dataset("json", data_files=files, split="train").map(tokens),
    processing_class=tokenizer,
)
trainer.train()
