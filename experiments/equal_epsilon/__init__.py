"""Trainings that `experiments/accuracy.py` compares at equal epsilon."""
