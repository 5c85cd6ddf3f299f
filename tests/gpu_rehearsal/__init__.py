"""Rehearses the GPU lanes on pretended GPUs: real rank processes, whose CUDA is the CPU."""
