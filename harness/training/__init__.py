"""GRPO with LoRA: advantages, losses, batches, optimizer, checkpoints, the loop."""
