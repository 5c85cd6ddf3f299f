"""Tests of ddp_equivalence/adapters, without the libraries of trainers."""
