"""Traces to imitate: ask a teacher (`teachers`, `endpoint`), keep what it wrote (`store`), choose (`selection`)."""
