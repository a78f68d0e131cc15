"""The join with accelerate and the Trainer."""
