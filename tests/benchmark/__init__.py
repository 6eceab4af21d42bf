"""Ours, TorchTitan's and the floor, measured side by side: `python -m tests.benchmark`, or `make bench`."""
