"""Seconds and memory of training steps, before GPUs are rented: `seconds`, `memory`, and the settings
of `BurstConfig(memory="auto")` that `fit`. Pure Python, no torch."""
