"""The answer: run, save, load, verify, evaluate."""
