"""parallel_r1: teach language models to think in parallel by reinforcement learning."""

__version__ = "0.1.0"
