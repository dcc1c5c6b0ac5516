"""longtrain: training language models on very long documents, in JAX."""

__version__ = "0.1.0"
