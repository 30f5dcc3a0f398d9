"""Tokenizing a corpus into a dataset folder: by many processes, stoppable at any moment."""
