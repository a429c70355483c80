"""The parts of `tools/reproduce.py`: what the rows are and what a run left of them, the claims, the report."""
