"""leyden: an inference server for the Nemotron-H family (Mamba-2, attention and mixture of experts)."""

__version__ = "0.1.0"
