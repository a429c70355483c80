"""Sampling responses: one narrow interface (`engine`), a colocated vLLM engine, a transformers engine."""
