"""Integration with accelerate, `Trainer` and TRL."""
