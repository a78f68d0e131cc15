"""A cell of a notebook that trains by two processes, on CPUs."""

import os

os.environ |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}  # without GPUs, before anything else

from accelerate import notebook_launcher


def train(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    import hf_burst

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf_burst.patch_model(LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(100, (8, 64))]
    arguments = TrainingArguments(
        output_dir=folder,
        parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
        per_device_train_batch_size=2,
        max_steps=3,
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()


notebook_launcher(train, ("outputs/notebook",), num_processes=2)
