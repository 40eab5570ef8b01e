"""Answering the questions of SQuAD 1.1."""
