"""The integration with Transformers and accelerate; the only part of hf_burst that imports them."""
