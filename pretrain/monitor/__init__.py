"""What a run measures of itself, and where it shows it: metrics.jsonl, the terminal, TensorBoard, a page."""
