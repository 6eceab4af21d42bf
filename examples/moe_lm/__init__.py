"""A small Mixture-of-Experts language model, on one device or with Expert Tensor Parallelism, on both frameworks."""
