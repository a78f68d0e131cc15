"""Trains the model in the folder `llama` by two workers of Ray Train, on CPUs."""

import os

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings):
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import hf_burst

    model = hf_burst.patch_model(AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32"))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(2, 50).repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=settings["folder"],
        parallelism_config=hf_burst.BurstParallelismConfig.from_env(),
        per_device_train_batch_size=1,
        max_steps=3,
        report_to="none",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    ray.init(runtime_env={"env_vars": {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}})  # on GPUs: ray.init()
    TorchTrainer(
        train,
        train_loop_config={"model": os.path.abspath("llama"), "folder": os.path.abspath("outputs/ray")},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=os.path.abspath("outputs")),
    ).fit()
