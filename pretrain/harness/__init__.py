"""lm-evaluation-harness on checkpoints and exports: a model, and groups of tasks."""
