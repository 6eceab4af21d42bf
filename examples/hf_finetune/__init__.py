"""What examples/finetune_hf.py is made of."""
