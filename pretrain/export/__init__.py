"""Checkpoints as files for other tools: one safetensors file, or a folder for `transformers`."""
