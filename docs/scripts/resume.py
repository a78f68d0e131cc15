"""Trains on text files by TRL's `SFTTrainer`, and goes on from the last whole checkpoint when it is launched again.

accelerate launch --multi_gpu --num_processes 4 docs/scripts/resume.py MODEL books/*.txt
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import hf_burst

model_name, *files = sys.argv[1:]
trainer = SFTTrainer(
    hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(model_name, dtype="float32")),
    SFTConfig(
        output_dir="outputs/resumed",
        parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
        max_length=4096,
        max_steps=2,  # a trial; without it, whole epochs
        save_steps=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=load_dataset("text", data_files=files, sample_by="document", split="train"),
    callbacks=[hf_burst.BurstResume()],  # refuses to go on with other batches or data
)
trainer.train(resume_from_checkpoint=hf_burst.last_checkpoint(trainer.args.output_dir))  # None at the first start
trainer.save_model()
