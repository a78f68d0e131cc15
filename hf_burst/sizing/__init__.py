"""Seconds and memory of training steps, before GPUs are rented: `seconds`, `memory`, and the `memory_rule` that
chooses the settings of `BurstConfig(memory="auto")`. Pure Python, no torch."""
